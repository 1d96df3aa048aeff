//! Bodies that are longer than, shorter than or different from what their heads announce, and
//! connections that end within them.

use tunnel_tests::targets::HostileAction;

use super::behavior::{Answer, BAD, Behavior, send};

pub(super) fn behaviors() -> Vec<Behavior> {
    [lengths(), chunks(), bodiless(), endless()].concat()
}

/// An answer that no caller may ever receive.
const FOREIGN: &str = "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nforeign";

/// The head of an answer in chunks.
const CHUNKED: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

fn lengths() -> Vec<Behavior> {
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n";
    let one = format!("{head}0123456789");
    let two = format!("{one}{FOREIGN}");
    let whole = Answer::Passed(200, "0123456789");
    let whole_or_cut = Answer::PassedOrCut(200, "0123456789");
    let flood = HostileAction::Flood(FOREIGN.repeat(100).into());
    let huge = "HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775807\r\n\r\nabc";
    let until_end = "HTTP/1.1 200 OK\r\n\r\n";
    let all = format!("{until_end}{FOREIGN}");
    let foreign = Answer::Passed(200, FOREIGN);
    let part = format!("{until_end}abc");
    let mut rows = vec![
        Behavior::sends("bytes behind the answer", format!("{one}abc"), whole),
        Behavior::sends("an answer behind the answer", &two, whole),
        Behavior::sends("an answer behind it, in a write of its own", &one, whole)
            .then(send(FOREIGN))
            .then(HostileAction::Hold),
        Behavior::sends("an answer behind it, and silence", &two, whole).then(HostileAction::Hold),
        Behavior::sends("a flood behind the answer", &one, whole).then(flood),
        Behavior::sends("reset behind the answer", &one, whole_or_cut).then(HostileAction::Reset),
        Behavior::drips("body drop by drop", &one, whole),
        Behavior::sends("length of all there is", huge, Answer::Cut),
        Behavior::sends("until the end, with an answer in it", all, foreign),
        Behavior::sends("until the end, a reset", part, Answer::Cut).then(HostileAction::Reset),
    ];
    for (name, part) in [
        ("no byte", ""),
        ("one byte", "0"),
        ("all but one", "012345678"),
    ] {
        let (at, bytes) = (format!("behind {name}"), format!("{head}{part}"));
        rows.extend(Behavior::ends(&at, bytes, Answer::Cut));
    }
    rows
}

fn chunks() -> Vec<Behavior> {
    let sends = |name: &str, rest: &str, answer| {
        let name = format!("chunks: {name}");
        Behavior::sends(&name, format!("{CHUNKED}{rest}"), answer)
    };
    let in_chunks = format!("3\r\nabc\r\n{FOREIGN}");
    let extension = format!("3;{}\r\nabc\r\n0\r\n\r\n", "x".repeat(1 << 20));
    let trailer = format!("3\r\nabc\r\n0\r\nX: {}\r\n\r\n", "y".repeat(1 << 20));
    let trailers = format!("3\r\nabc\r\n0\r\n{}\r\n", "X: y\r\n".repeat(2000));
    let cut = [
        ("size that is no number", "xyz\r\nabc\r\n0\r\n\r\n"),
        ("negative size", "-3\r\nabc\r\n0\r\n\r\n"),
        ("huge size", "fffffffffffffffff\r\nabc\r\n0\r\n\r\n"),
        ("no size", "\r\nabc\r\n0\r\n\r\n"),
        ("chunk longer than its size", "3\r\nabcd\r\n0\r\n\r\n"),
        ("chunk shorter than its size", "5\r\nabc\r\n0\r\n\r\n"),
        ("an answer in place of a chunk", in_chunks.as_str()),
        ("end within a size", "3\r\nabc\r\n1"),
        ("end within a chunk", "3\r\na"),
        ("end between chunks", "3\r\nabc\r\n"),
        ("end before the last CR LF", "3\r\nabc\r\n0\r\n"),
        ("end within a trailer", "3\r\nabc\r\n0\r\nX: y"),
        ("extension of 1 MiB", extension.as_str()),
        ("trailer of 1 MiB", trailer.as_str()),
        ("2000 trailers", trailers.as_str()),
        ("bad trailer", "3\r\nabc\r\n0\r\nno colon\r\n\r\n"),
    ];
    let cut = cut.map(|(name, rest)| sends(name, rest, Answer::Cut));
    let whole = Answer::Passed(200, "abc");
    let body = "3;ext=1\r\nabc\r\n0\r\nX-End: 1\r\n\r\n";
    let two = format!("{body}{FOREIGN}");
    let mut rows = Vec::from(cut);
    rows.extend([
        sends("extension and trailer", body, whole),
        sends("an answer behind them", &two, whole),
        Behavior::drips("chunks: drop by drop", format!("{CHUNKED}{body}"), whole),
    ]);
    for fields in [
        "Content-Length: 300\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 1\r\n",
    ] {
        let answer = format!("HTTP/1.1 200 OK\r\n{fields}\r\n{body}");
        let name = format!("chunks and a length: {fields:?}");
        rows.push(Behavior::sends(&name, answer, whole));
    }
    for coding in ["gzip", "chunked, gzip", "xchunked"] {
        let answer = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: {coding}\r\n\r\n{body}");
        let name = format!("coding {coding:?} that the caller cannot know");
        rows.push(Behavior::sends(&name, answer, BAD));
    }
    rows
}

/// Returns answers that have no body, whatever their fields announce.
fn bodiless() -> Vec<Behavior> {
    let with_body = |status: &str| format!("HTTP/1.1 {status}\r\nContent-Length: 7\r\n\r\nforeign");
    let empty = |status| Answer::Passed(status, "");
    let chunks = CHUNKED.replace("200 OK", "204 No Content") + "7\r\nforeign\r\n0\r\n\r\n";
    let ok = with_body("200 OK");
    let two = format!("{ok}{FOREIGN}");
    vec![
        Behavior::sends("204 with a body", with_body("204 No Content"), empty(204)),
        Behavior::sends("304 with a body", with_body("304 Not Modified"), empty(304)),
        Behavior::sends("204 with chunks", chunks, empty(204)),
        Behavior::sends("HEAD with a body", ok, empty(200)).to("HEAD"),
        Behavior::sends("HEAD with an answer behind it", two, empty(200)).to("HEAD"),
    ]
}

fn endless() -> Vec<Behavior> {
    let holds = |name: &str, bytes: &str| {
        let name = format!("{name}, then silence");
        Behavior::sends(&name, bytes, Answer::None).then(HostileAction::Hold)
    };
    let floods = |name: &str, start: &str, flood: &[u8], answer| {
        let (name, bytes) = (
            format!("{name} without an end"),
            format!("{CHUNKED}{start}"),
        );
        let flood = HostileAction::Flood(flood.repeat(1000));
        Behavior::sends(&name, bytes, answer).then(flood)
    };
    let half_body = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc";
    vec![
        holds("half a body", half_body),
        holds("half a chunk", &format!("{CHUNKED}9\r\nabc")),
        holds("no last chunk", &format!("{CHUNKED}3\r\nabc\r\n")),
        floods("chunks", "", b"3\r\nabc\r\n", Answer::None),
        floods("trailers", "0\r\n", b"X: y\r\n", Answer::Cut),
        floods("an extension", "3;", b"x", Answer::Cut),
    ]
}
