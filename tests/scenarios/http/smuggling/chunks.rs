//! Chunked bodies: sizes, extensions, ends and trailers (RFC 9112, section 7.1).

use super::case::{Case, Expect, HIDDEN, Want, post};

pub(super) fn cases() -> Vec<Case> {
    [sizes(), shapes(), trailers()].concat()
}

/// Returns a chunked request with `rest` as its body.
fn chunked(rest: &str) -> String {
    post("Transfer-Encoding: chunked\r\nConnection: close\r\n", rest)
}

/// Creates a case whose body turns out to be malformed after the server has forwarded the head. The
/// target receives a truncated request, never a complete one.
fn cut(name: &str, rest: &str) -> Case {
    Case::new(name, chunked(rest), Expect::Cut)
}

fn sizes() -> Vec<Case> {
    let mut cases = Vec::new();
    for size in [
        "0x3",
        "+3",
        "-3",
        "3.",
        "g",
        "",
        " ",
        "3 3",
        "\"3\"",
        "3\0",
        "3\u{b}",
        "10000000000000000",
        "fffffffffffffffff3",
        "3\r",
        "3 \u{1}",
        "_3",
        "3_",
        "٣",
    ] {
        let rest = format!("{size}\r\nabc\r\n0\r\n\r\n{HIDDEN}");
        cases.push(cut(&format!("chunk size {size:?}"), &rest));
    }
    for size in [
        "3",
        "03",
        "0003",
        "00000000000000003",
        "3;x",
        "3;x=y",
        "3;x=\"y\"",
        "3;a;b=c",
    ] {
        let bytes = chunked(&format!("{size}\r\nabc\r\n0\r\n\r\n"));
        let routed = Expect::Routed(vec![Want::own("POST", "/p", "abc")]);
        cases.push(Case::new(&format!("chunk size {size:?}"), bytes, routed));
    }
    cases
}

fn shapes() -> Vec<Case> {
    let endless = format!("3;{}", "x".repeat(64 << 10));
    let mut cases = vec![
        cut("chunk shorter than its size", "4\r\nabc\r\n0\r\n\r\n"),
        cut("extension that never ends", &endless),
        cut("a request in place of a chunk", HIDDEN),
    ];
    for shape in [
        // A chunk that is longer than its size, then ends of chunk data, sizes and extensions.
        "3\r\nabcd\r\n0\r\n\r\n",
        "3\r\nabc\n0\r\n\r\n",
        "3\r\nabc\r0\r\n\r\n",
        "3\nabc\r\n0\r\n\r\n",
        "3\rabc\r\n0\r\n\r\n",
        "3\r\nabc\r\n0\n\r\n",
        "3;a\nb\r\nabc\r\n0\r\n\r\n",
        "3;a\rb\r\nabc\r\n0\r\n\r\n",
        // An empty line in place of a chunk.
        "\r\n",
    ] {
        let name = format!("chunks {shape:?}");
        cases.push(cut(&name, &format!("{shape}{HIDDEN}")));
    }
    let routed = |body: &str| Expect::Routed(vec![Want::own("POST", "/p", body)]);
    let one_by_one: String = "abcdef".chars().map(|c| format!("1\r\n{c}\r\n")).collect();
    let inside = format!("{:x}\r\n{HIDDEN}\r\n", HIDDEN.len());
    for (name, rest, body) in [
        ("no chunk", "", ""),
        ("bytes one by one", one_by_one.as_str(), "abcdef"),
        ("size in capitals", "A\r\n0123456789\r\n", "0123456789"),
        ("CR LF as data", "4\r\n\r\n\r\n\r\n", "\r\n\r\n"),
        // The text of the body is a request, which must stay part of the body.
        ("a request inside", inside.as_str(), HIDDEN),
    ] {
        let bytes = chunked(&format!("{rest}0\r\n\r\n"));
        cases.push(Case::new(name, bytes, routed(body)));
    }
    let zeros = chunked("3\r\nabc\r\n000\r\n\r\n");
    let lf = chunked(&format!("3\r\nabc\r\n0\r\n\n{HIDDEN}"));
    let huge = chunked(&format!("ffffffffffffffff\r\nabc\r\n0\r\n\r\n{HIDDEN}"));
    let length = format!("Content-Length: {}\r\nConnection: close\r\n", HIDDEN.len());
    let in_length = post(&length, HIDDEN);
    cases.extend([
        Case::new("several zeros", zeros, routed("abc")),
        Case::new("end ended by LF", lf, routed("abc")),
        Case::new("a chunk of all there is", huge, Expect::Gone),
        Case::new("a request in a length", in_length, routed(HIDDEN)),
    ]);
    cases
}

fn trailers() -> Vec<Case> {
    let end = |trailers: &str| format!("3\r\nabc\r\n0\r\n{trailers}\r\n");
    let routed = || Expect::Routed(vec![Want::own("POST", "/p", "abc")]);
    let mut cases = Vec::new();
    // No trailer may change the framing, the routing or the fields of the head.
    for trailer in [
        "Content-Length: 300\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Host: worker-2:@port\r\n",
        "X-Tunnel-Proxy-Host: worker-2\r\n",
        "Connection: keep-alive\r\n",
        "X-Fine: yes\r\n",
    ] {
        let name = format!("trailer {trailer:?}");
        cases.push(Case::new(&name, chunked(&end(trailer)), routed()));
    }
    for trailer in [
        "no colon\r\n",
        "A : b\r\n",
        "A: b\r\n c: d\r\n",
        "A: b\rc\r\n",
        "A: b\0\r\n",
        ": b\r\n",
    ] {
        cases.push(cut(&format!("trailer {trailer:?}"), &end(trailer)));
    }
    let many: String = (0..2000).map(|index| format!("X-{index}: y\r\n")).collect();
    let large = format!("X: {}\r\n", "y".repeat(100 << 10));
    cases.push(cut("2000 trailers", &end(&many)));
    cases.push(cut("trailer of 100 KiB", &end(&large)));
    cases
}
