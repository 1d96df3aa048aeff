//! The end of a body: Content-Length against Transfer-Encoding, and each against itself (RFC 9112,
//! section 6).

use super::case::{Case, Expect, HIDDEN, Want, post};

pub(super) fn cases() -> Vec<Case> {
    [both(), lengths(), codings(), versions()].concat()
}

/// Returns CL.TE and TE.CL in every order and spelling, with a request hidden where one of the
/// readings ends. The server refuses such a head, which RFC 9112, section 6.3, treats as an error.
/// The server never reads the bytes after the head.
fn both() -> Vec<Case> {
    let cl_te = format!("0\r\n\r\n{HIDDEN}");
    let te_cl = format!("{:x}\r\n{HIDDEN}\r\n0\r\n\r\n", HIDDEN.len());
    let lines = [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 4\r\n",
        "TRANSFER-ENCODING: CHUNKED\r\nCONTENT-LENGTH: 4\r\n",
        "Content-Length: 4\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\nContent-Length: 400\r\n",
        "Transfer-Encoding:chunked\r\nContent-Length:4\r\n",
    ];
    let mut cases = Vec::new();
    for (index, lines) in lines.iter().enumerate() {
        for (kind, rest) in [("CL.TE", &cl_te), ("TE.CL", &te_cl)] {
            let name = format!("{kind} {index}: {lines:?}");
            cases.push(Case::refused(&name, post(lines, rest)));
        }
    }
    cases
}

fn lengths() -> Vec<Case> {
    let close = "Connection: close\r\n";
    let mut cases = Vec::new();
    for value in [
        "+3",
        "-3",
        "3,3",
        "3, 3",
        "3, 4",
        "3 3",
        "0x3",
        "3.0",
        "3;",
        "three",
        "\"3\"",
        "3\t4",
        "",
        " ",
        "1e1",
        "٣",
        "18446744073709551616",
        "99999999999999999999999999",
    ] {
        let name = format!("Content-Length {value:?}");
        let fields = format!("Content-Length: {value}\r\n");
        cases.push(Case::refused(&name, post(&fields, &format!("abc{HIDDEN}"))));
    }
    for (name, fields) in [
        ("two equal", "Content-Length: 3\r\nContent-Length: 3\r\n"),
        (
            "two different",
            "Content-Length: 3\r\nContent-Length: 4\r\n",
        ),
        (
            "three, the last differs",
            "Content-Length: 3\r\nContent-Length: 3\r\nContent-Length: 30\r\n",
        ),
        (
            "different spelling",
            "content-length: 3\r\nCONTENT-LENGTH: 4\r\n",
        ),
    ] {
        let bytes = post(fields, &format!("abc{HIDDEN}"));
        cases.push(Case::refused(&format!("Content-Length, {name}"), bytes));
    }
    for (name, value) in [
        ("leading zero", "03"),
        ("spaces around", "  3  "),
        ("tab", "\t3"),
    ] {
        let bytes = post(&format!("Content-Length: {value}\r\n{close}"), "abc");
        let routed = Expect::Routed(vec![Want::own("POST", "/p", "abc")]);
        cases.push(Case::new(&format!("Content-Length, {name}"), bytes, routed));
    }
    // Content-Length stays although Connection names it. Otherwise the body would become the next
    // request.
    let bytes = post(
        "Connection: close, Content-Length\r\nContent-Length: 3\r\n",
        "abc",
    );
    let routed = Expect::Routed(vec![Want::own("POST", "/p", "abc")]);
    cases.push(Case::new(
        "Content-Length named by Connection",
        bytes,
        routed,
    ));
    let bytes = post("Content-Length: 18446744073709551615\r\n", HIDDEN);
    let refused = Expect::Refused(431);
    cases.push(Case::new("Content-Length of all there is", bytes, refused));
    let bytes = post("Content-Length: 30\r\n", "abc");
    cases.push(Case::new(
        "Content-Length beyond what is sent",
        bytes,
        Expect::Gone,
    ));
    cases
}

fn codings() -> Vec<Case> {
    let body = format!("0\r\n\r\n{HIDDEN}");
    let mut cases = Vec::new();
    for value in [
        "identity",
        "gzip",
        "chunked, identity",
        "chunked, gzip",
        "xchunked",
        "chunkedx",
        "chunked;q=1",
        "\"chunked\"",
        "'chunked'",
        "chunk",
        "chunked\u{b}",
        "\u{b}chunked",
        "chunked\0",
        "[chunked]",
        "x",
        "",
        "chunked,",
        "chunked chunked",
        "chunked, chunked",
        ", chunked",
        "gzip, chunked",
        "identity, chunked",
    ] {
        let name = format!("Transfer-Encoding {value:?}");
        let fields = format!("Transfer-Encoding: {value}\r\n");
        cases.push(Case::refused(&name, post(&fields, &body)));
    }
    for (name, fields) in [
        (
            "twice",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        ),
        (
            "chunked then identity",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        ),
        (
            "identity then chunked",
            "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
        ),
        ("space before the colon", "Transfer-Encoding : chunked\r\n"),
        ("tab before the colon", "Transfer-Encoding\t: chunked\r\n"),
        ("folded", "Transfer-Encoding:\r\n chunked\r\n"),
        (
            "folded behind another",
            "X: y\r\n Transfer-Encoding: chunked\r\n",
        ),
        ("behind a bare CR", "X: y\rTransfer-Encoding: chunked\r\n"),
        (
            "with an underscore, and a length",
            "Transfer_Encoding : chunked\r\nContent-Length: 3\r\n",
        ),
    ] {
        cases.push(Case::refused(
            &format!("Transfer-Encoding {name}"),
            post(fields, &body),
        ));
    }
    let routed = |body| Expect::Routed(vec![Want::own("POST", "/p", body)]);
    for (name, fields) in [
        (
            "in capitals",
            "Transfer-Encoding: CHUNKED\r\nConnection: close\r\n",
        ),
        (
            "with spaces around",
            "Transfer-Encoding: \t chunked \t\r\nConnection: close\r\n",
        ),
        (
            "named by Connection",
            "Connection: close, Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n",
        ),
        (
            "and TE",
            "TE: chunked, trailers\r\nConnection: close, TE\r\nTransfer-Encoding: chunked\r\n",
        ),
    ] {
        let bytes = post(fields, "3\r\nabc\r\n0\r\n\r\n");
        cases.push(Case::new(
            &format!("Transfer-Encoding {name}"),
            bytes,
            routed("abc"),
        ));
    }
    cases
}

fn versions() -> Vec<Case> {
    let old = |fields: &str, rest: &str| {
        format!("POST /p HTTP/1.0\r\nHost: worker-1:@port\r\n{fields}\r\n{rest}")
    };
    vec![
        Case::refused(
            "Transfer-Encoding in HTTP/1.0",
            old(
                "Transfer-Encoding: chunked\r\n",
                &format!("0\r\n\r\n{HIDDEN}"),
            ),
        ),
        Case::refused(
            "Transfer-Encoding and Content-Length in HTTP/1.0",
            old(
                "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
                &format!("0\r\n\r\n{HIDDEN}"),
            ),
        ),
        Case::new(
            "HTTP/1.0 with a length becomes HTTP/1.1",
            old("Content-Length: 3\r\n", "abc"),
            Expect::Routed(vec![Want::own("POST", "/p", "abc")]),
        ),
        Case::new(
            "HTTP/1.0 ends behind its request",
            old("Content-Length: 3\r\n", &format!("abc{HIDDEN}")),
            Expect::Routed(vec![Want::own("POST", "/p", "abc")]),
        ),
        Case::new(
            "HTTP/1.0 that asks for an upgrade gets none",
            "GET /g HTTP/1.0\r\nHost: worker-1:@port\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n",
            Expect::Routed(vec![Want::own("GET", "/g", "")]),
        ),
    ]
}
