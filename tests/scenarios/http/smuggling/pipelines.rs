//! Several requests in one write. The server routes each one by its own Host, and never routes
//! bytes of a body or of an upgrade.

use super::case::{Case, Expect, HIDDEN, Want, post};

pub(super) fn cases() -> Vec<Case> {
    let get = "GET /g HTTP/1.1\r\nHost: worker-1:@port\r\n\r\n";
    let own = |target: &str| Want::own("GET", target, "");
    let hidden = || Want::other("GET", "/hidden", "");
    let body = "Content-Length: 3\r\n";
    let with_body = || Want::own("POST", "/p", "abc");
    let (coding, chunks) = ("Transfer-Encoding: chunked\r\n", "3\r\nabc\r\n0\r\n\r\n");
    let mut cases = Vec::new();
    for (name, first, want) in [
        ("another request", get.to_owned(), own("/g")),
        ("a body", post(body, "abc"), with_body()),
        ("a chunked body", post(coding, chunks), with_body()),
        ("an empty line", post(body, "abc\r\n"), with_body()),
        (
            "GET with a body",
            format!("GET /g HTTP/1.1\r\nHost: worker-1:@port\r\n{body}\r\nabc"),
            Want::own("GET", "/g", "abc"),
        ),
    ] {
        cases.push(Case::new(
            &format!("a request behind {name}"),
            format!("{first}{HIDDEN}"),
            Expect::Routed(vec![want, hidden()]),
        ));
    }
    let close = get.replacen("\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1) + HIDDEN;
    let pair = format!("{get}{}", HIDDEN.replace("Connection: close\r\n", ""));
    let pairs = format!("{}{HIDDEN}", pair.repeat(25));
    let mut wanted = vec![[own("/g"), hidden()]; 25].concat();
    wanted.push(hidden());
    let unannounced = format!("{get}xyz {HIDDEN}");
    let refused = Expect::RoutedThenRefused(own("/g"));
    cases.extend([
        Case::new("Connection: close", close, Expect::Routed(vec![own("/g")])),
        Case::new("fifty requests to and fro", pairs, Expect::Routed(wanted)),
        Case::new("a body that was not announced", unannounced, refused),
    ]);
    // The server checks the heads of later requests like the first one, wherever bodies end.
    for (name, first, recorded) in [
        ("a request", get.to_owned(), ""),
        ("a body", post(body, "abc"), "abc"),
        (
            "line ends",
            post("Content-Length: 4\r\n", "\n\na\n"),
            "\n\na\n",
        ),
        ("a chunked body", post(coding, chunks), "abc"),
        ("an empty chunked body", post(coding, "0\r\n\r\n"), ""),
        (
            "a trailer",
            post(coding, "3\r\nabc\r\n0\r\nX: y\r\n\r\n"),
            "abc",
        ),
        (
            "extensions",
            post(coding, "3;a=b\r\nabc\r\n00;x\r\n\r\n"),
            "abc",
        ),
        (
            "an end within a chunk",
            post(coding, "5\r\n0\r\n\r\n\r\n0\r\n\r\n"),
            "0\r\n\r\n",
        ),
    ] {
        let mut words = first.split(' ');
        let (method, target) = (words.next(), words.next());
        let want = Want::own(
            method.unwrap_or_default(),
            target.unwrap_or_default(),
            recorded,
        );
        let both = "\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\nConn";
        let lengths = "\r\nContent-Length: 0\r\nContent-Length: 0\r\nConn";
        for (what, second) in [
            ("bare LF", HIDDEN.replace("\r\n", "\n")),
            ("two lengths", HIDDEN.replace("\r\nConn", lengths)),
            ("two framings", HIDDEN.replace("\r\nConn", both)),
        ] {
            cases.push(Case::new(
                &format!("{what} behind {name}"),
                format!("{first}{second}"),
                Expect::RoutedThenRefused(want.clone()),
            ));
        }
    }
    // Bytes after a request for an upgrade that is not granted belong to no request (S40). The offer
    // h2c is not passed on, so its request is like any other.
    for protocol in ["SPDY/3.1", "websocket", "h2c", "TLS/1.0"] {
        let mut wants = vec![Want::own("GET", "/g", "")];
        if protocol == "h2c" {
            wants.push(Want::other("GET", "/hidden", ""));
        }
        let bytes = format!(
            "GET /g HTTP/1.1\r\nHost: worker-1:@port\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n{HIDDEN}"
        );
        cases.push(Case::new(
            &format!("a request behind one for an upgrade to {protocol} that is answered with 200"),
            bytes,
            Expect::Routed(wants),
        ));
    }
    cases
}
