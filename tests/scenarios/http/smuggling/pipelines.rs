//! Several requests in one write. The server routes each one by its own Host, and never routes
//! bytes of a body or of an upgrade.

use super::case::{Case, Expect, HIDDEN, Want, post};

pub(super) fn cases() -> Vec<Case> {
    let get = "GET /g HTTP/1.1\r\nHost: worker-1:@port\r\n\r\n";
    let own = |target: &str| Want::own("GET", target, "");
    let hidden = || Want::other("GET", "/hidden", "");
    let body = "Content-Length: 3\r\n";
    let mut cases = vec![
        Case::new(
            "two requests, two nodes",
            format!("{get}{HIDDEN}"),
            Expect::Routed(vec![own("/g"), hidden()]),
        ),
        Case::new(
            "body, then a request",
            format!("{}{HIDDEN}", post(body, "abc")),
            Expect::Routed(vec![Want::own("POST", "/p", "abc"), hidden()]),
        ),
        Case::new(
            "chunked body, then a request",
            format!(
                "{}{HIDDEN}",
                post("Transfer-Encoding: chunked\r\n", "3\r\nabc\r\n0\r\n\r\n")
            ),
            Expect::Routed(vec![Want::own("POST", "/p", "abc"), hidden()]),
        ),
        Case::new(
            "an empty line between two requests",
            format!("{}\r\n{HIDDEN}", post(body, "abc")),
            Expect::Routed(vec![Want::own("POST", "/p", "abc"), hidden()]),
        ),
        Case::new(
            "GET with a body, then a request",
            format!("GET /g HTTP/1.1\r\nHost: worker-1:@port\r\n{body}\r\nabc{HIDDEN}"),
            Expect::Routed(vec![Want::own("GET", "/g", "abc"), hidden()]),
        ),
        Case::new(
            "Connection: close, then a request",
            format!("GET /g HTTP/1.1\r\nHost: worker-1:@port\r\nConnection: close\r\n\r\n{HIDDEN}"),
            Expect::Routed(vec![own("/g")]),
        ),
        Case::new(
            "fifty requests to and fro",
            {
                let pair = format!("{get}{}", HIDDEN.replace("Connection: close\r\n", ""));
                format!("{}{HIDDEN}", pair.repeat(25))
            },
            Expect::Routed(
                (0..51)
                    .map(|index| {
                        if index % 2 == 0 && index < 50 {
                            own("/g")
                        } else {
                            hidden()
                        }
                    })
                    .collect(),
            ),
        ),
        Case::new(
            "a body that was not announced is the next request",
            format!("{get}xyz {HIDDEN}"),
            Expect::RoutedThenRefused(own("/g")),
        ),
    ];
    // The server checks the heads of later requests like the first one, wherever bodies end.
    for (name, first) in [
        ("a request", get.to_owned()),
        ("a body", post(body, "abc")),
        (
            "a body with line ends",
            post("Content-Length: 4\r\n", "\n\na\n"),
        ),
    ] {
        for (what, second) in [
            ("bare LF", HIDDEN.replace("\r\n", "\n")),
            (
                "two lengths",
                HIDDEN.replace(
                    "\r\nConn",
                    "\r\nContent-Length: 0\r\nContent-Length: 0\r\nConn",
                ),
            ),
        ] {
            cases.push(Case::new(
                &format!("{what} behind {name}"),
                format!("{first}{second}"),
                Expect::RoutedThenRefused(Want {
                    own: true,
                    method: first[..4].trim().to_owned(),
                    target: first.split(' ').nth(1).unwrap_or_default().to_owned(),
                    body: first
                        .split_once("\r\n\r\n")
                        .unwrap_or_default()
                        .1
                        .to_owned(),
                }),
            ));
        }
    }
    // Bytes after a request for an upgrade that is not granted belong to no request (S40).
    for protocol in ["SPDY/3.1", "websocket", "h2c", "TLS/1.0"] {
        let bytes = format!(
            "GET /g HTTP/1.1\r\nHost: worker-1:@port\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n{HIDDEN}"
        );
        cases.push(Case::new(
            &format!("a request behind one for an upgrade to {protocol} that is answered with 200"),
            bytes,
            Expect::Bad(502),
        ));
    }
    cases
}
