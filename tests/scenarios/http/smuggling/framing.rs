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
    for fields in [
        "Content-Length: 3\r\nContent-Length: 3\r\n",
        "Content-Length: 3\r\nContent-Length: 4\r\n",
        "Content-Length: 3\r\nContent-Length: 3\r\nContent-Length: 30\r\n",
        "content-length: 3\r\nCONTENT-LENGTH: 4\r\n",
    ] {
        let bytes = post(fields, &format!("abc{HIDDEN}"));
        cases.push(Case::refused(&format!("lengths {fields:?}"), bytes));
    }
    for fields in [
        "Content-Length: 03\r\nConnection: close\r\n",
        "Content-Length:   3  \r\nConnection: close\r\n",
        "Content-Length: \t3\r\nConnection: close\r\n",
        // The field stays although Connection names it. Otherwise the body would become the next
        // request.
        "Connection: close, Content-Length\r\nContent-Length: 3\r\n",
    ] {
        let routed = Expect::Routed(vec![Want::own("POST", "/p", "abc")]);
        let name = format!("length {fields:?}");
        cases.push(Case::new(&name, post(fields, "abc"), routed));
    }
    let huge = post("Content-Length: 18446744073709551615\r\n", HIDDEN);
    let more = post("Content-Length: 30\r\n", "abc");
    cases.extend([
        Case::new("length of all there is", huge, Expect::Refused(431)),
        Case::new("length beyond what is sent", more, Expect::Gone),
    ]);
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
    for fields in [
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
        // A space and a tab before the colon, folded fields, and a bare CR.
        "Transfer-Encoding : chunked\r\n",
        "Transfer-Encoding\t: chunked\r\n",
        "Transfer-Encoding:\r\n chunked\r\n",
        "X: y\r\n Transfer-Encoding: chunked\r\n",
        "X: y\rTransfer-Encoding: chunked\r\n",
        // An underscore, and a length.
        "Transfer_Encoding : chunked\r\nContent-Length: 3\r\n",
    ] {
        let name = format!("coding {fields:?}");
        cases.push(Case::refused(&name, post(fields, &body)));
    }
    for fields in [
        "Transfer-Encoding: CHUNKED\r\nConnection: close\r\n",
        "Transfer-Encoding: \t chunked \t\r\nConnection: close\r\n",
        "Connection: close, Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n",
        "TE: chunked, trailers\r\nConnection: close, TE\r\nTransfer-Encoding: chunked\r\n",
    ] {
        let bytes = post(fields, "3\r\nabc\r\n0\r\n\r\n");
        let routed = Expect::Routed(vec![Want::own("POST", "/p", "abc")]);
        cases.push(Case::new(&format!("coding {fields:?}"), bytes, routed));
    }
    cases
}

fn versions() -> Vec<Case> {
    let old = |fields: &str, rest: &str| {
        format!("POST /p HTTP/1.0\r\nHost: worker-1:@port\r\n{fields}\r\n{rest}")
    };
    let (coding, length) = ("Transfer-Encoding: chunked\r\n", "Content-Length: 3\r\n");
    let hidden = format!("0\r\n\r\n{HIDDEN}");
    let with_coding = old(coding, &hidden);
    let with_both = old(&format!("{length}{coding}"), &hidden);
    let with_length = old(length, "abc");
    // HTTP/1.0 ends behind its request.
    let two = format!("{with_length}{HIDDEN}");
    let upgrade = "GET /g HTTP/1.0\r\nHost: worker-1:@port\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
    let routed = |method, target, body| Expect::Routed(vec![Want::own(method, target, body)]);
    let post = || routed("POST", "/p", "abc");
    vec![
        Case::refused("Transfer-Encoding in HTTP/1.0", with_coding),
        Case::refused("a coding and a length in HTTP/1.0", with_both),
        Case::new("HTTP/1.0 becomes HTTP/1.1", with_length, post()),
        Case::new("HTTP/1.0, and another request", two, post()),
        Case::new("no upgrade of HTTP/1.0", upgrade, routed("GET", "/g", "")),
    ]
}
