//! Bodies that are longer than, shorter than or different from what their heads announce, and
//! connections that end within them.

use tunnel_tests::targets::HostileAction;

use super::behavior::{Answer, BAD, Behavior, send};

pub(super) fn behaviors() -> Vec<Behavior> {
    [lengths(), chunks(), bodiless(), endless()].concat()
}

/// An answer that no caller may ever receive.
const FOREIGN: &str = "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nforeign";

fn lengths() -> Vec<Behavior> {
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n";
    let whole = Answer::Passed(200, "0123456789");
    let mut rows = vec![
        Behavior::sends(
            "bytes behind the answer",
            format!("{head}0123456789abc"),
            whole,
        ),
        Behavior::sends(
            "an answer behind the answer",
            format!("{head}0123456789{FOREIGN}"),
            whole,
        ),
        Behavior::actions(
            "an answer behind the answer, in a write of its own",
            vec![
                HostileAction::ReadHead,
                send(format!("{head}0123456789")),
                send(FOREIGN),
                HostileAction::Hold,
            ],
            whole,
        ),
        Behavior::actions(
            "an answer behind the answer, and silence",
            vec![
                HostileAction::ReadHead,
                send(format!("{head}0123456789{FOREIGN}")),
                HostileAction::Hold,
            ],
            whole,
        ),
        Behavior::actions(
            "a flood behind the answer",
            vec![
                HostileAction::ReadHead,
                send(format!("{head}0123456789")),
                HostileAction::Flood(FOREIGN.repeat(100).into()),
            ],
            whole,
        ),
        Behavior::actions(
            "reset behind the answer",
            vec![
                HostileAction::ReadHead,
                send(format!("{head}0123456789")),
                HostileAction::Reset,
            ],
            Answer::PassedOrCut(200, "0123456789"),
        ),
        Behavior::actions(
            "body drop by drop",
            vec![
                HostileAction::ReadHead,
                HostileAction::Drip(format!("{head}0123456789").into()),
            ],
            whole,
        ),
        Behavior::sends(
            "length of all there is",
            "HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775807\r\n\r\nabc",
            Answer::Cut,
        ),
        Behavior::sends(
            "until the end, with an answer in it",
            format!("HTTP/1.1 200 OK\r\n\r\n{FOREIGN}"),
            Answer::Passed(200, FOREIGN),
        ),
        Behavior::actions(
            "until the end, which is a reset",
            vec![
                HostileAction::ReadHead,
                send("HTTP/1.1 200 OK\r\n\r\nabc"),
                HostileAction::Reset,
            ],
            Answer::Cut,
        ),
    ];
    for (name, part) in [
        ("no byte", ""),
        ("one byte", "0"),
        ("all but one", "012345678"),
    ] {
        rows.push(Behavior::sends(
            &format!("end behind {name}"),
            format!("{head}{part}"),
            Answer::Cut,
        ));
        let actions = vec![
            HostileAction::ReadHead,
            send(format!("{head}{part}")),
            HostileAction::Reset,
        ];
        rows.push(Behavior::actions(
            &format!("reset behind {name}"),
            actions,
            Answer::Cut,
        ));
    }
    rows
}

fn chunks() -> Vec<Behavior> {
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut rows = Vec::new();
    for (name, rest) in [
        (
            "size that is no number",
            "xyz\r\nabc\r\n0\r\n\r\n".to_owned(),
        ),
        ("negative size", "-3\r\nabc\r\n0\r\n\r\n".to_owned()),
        (
            "size beyond all bounds",
            "fffffffffffffffff\r\nabc\r\n0\r\n\r\n".to_owned(),
        ),
        ("no size", "\r\nabc\r\n0\r\n\r\n".to_owned()),
        (
            "chunk longer than its size",
            "3\r\nabcd\r\n0\r\n\r\n".to_owned(),
        ),
        (
            "chunk shorter than its size",
            "5\r\nabc\r\n0\r\n\r\n".to_owned(),
        ),
        (
            "an answer in place of a chunk",
            format!("3\r\nabc\r\n{FOREIGN}"),
        ),
        ("end within a size", "3\r\nabc\r\n1".to_owned()),
        ("end within a chunk", "3\r\na".to_owned()),
        ("end between chunks", "3\r\nabc\r\n".to_owned()),
        ("end before the last CR LF", "3\r\nabc\r\n0\r\n".to_owned()),
        ("end within a trailer", "3\r\nabc\r\n0\r\nX: y".to_owned()),
        (
            "extension of 1 MiB",
            format!("3;{}\r\nabc\r\n0\r\n\r\n", "x".repeat(1 << 20)),
        ),
        (
            "trailer of 1 MiB",
            format!("3\r\nabc\r\n0\r\nX: {}\r\n\r\n", "y".repeat(1 << 20)),
        ),
        (
            "2000 trailers",
            format!("3\r\nabc\r\n0\r\n{}\r\n", "X: y\r\n".repeat(2000)),
        ),
        (
            "bad trailer",
            "3\r\nabc\r\n0\r\nno colon\r\n\r\n".to_owned(),
        ),
    ] {
        rows.push(Behavior::sends(
            &format!("chunks: {name}"),
            format!("{head}{rest}"),
            Answer::Cut,
        ));
    }
    let whole = Answer::Passed(200, "abc");
    let body = "3;ext=1\r\nabc\r\n0\r\nX-End: 1\r\n\r\n";
    rows.push(Behavior::sends(
        "chunks: extension and trailer",
        format!("{head}{body}"),
        whole,
    ));
    rows.push(Behavior::sends(
        "chunks: an answer behind them",
        format!("{head}{body}{FOREIGN}"),
        whole,
    ));
    let drip = vec![
        HostileAction::ReadHead,
        HostileAction::Drip(format!("{head}{body}").into()),
    ];
    rows.push(Behavior::actions("chunks: drop by drop", drip, whole));
    for fields in [
        "Content-Length: 300\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 1\r\n",
    ] {
        let answer = format!("HTTP/1.1 200 OK\r\n{fields}\r\n{body}");
        rows.push(Behavior::sends(
            &format!("chunks and a length: {fields:?}"),
            answer,
            whole,
        ));
    }
    for coding in ["gzip", "chunked, gzip", "xchunked"] {
        let answer = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: {coding}\r\n\r\n{body}");
        rows.push(Behavior::sends(
            &format!("coding {coding:?} that the caller cannot know"),
            answer,
            BAD,
        ));
    }
    rows
}

/// Returns answers that have no body, whatever their fields announce.
fn bodiless() -> Vec<Behavior> {
    let with_body = |status: &str| format!("HTTP/1.1 {status}\r\nContent-Length: 7\r\n\r\nforeign");
    vec![
        Behavior::sends(
            "204 with a body",
            with_body("204 No Content"),
            Answer::Passed(204, ""),
        ),
        Behavior::sends(
            "304 with a body",
            with_body("304 Not Modified"),
            Answer::Passed(304, ""),
        ),
        Behavior::sends(
            "204 with chunks",
            "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n7\r\nforeign\r\n0\r\n\r\n",
            Answer::Passed(204, ""),
        ),
        Behavior::sends(
            "HEAD with a body",
            with_body("200 OK"),
            Answer::Passed(200, ""),
        )
        .to("HEAD"),
        Behavior::sends(
            "HEAD with an answer behind it",
            format!("{}{FOREIGN}", with_body("200 OK")),
            Answer::Passed(200, ""),
        )
        .to("HEAD"),
    ]
}

fn endless() -> Vec<Behavior> {
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let hold = |part: &str| vec![HostileAction::ReadHead, send(part), HostileAction::Hold];
    vec![
        Behavior::actions(
            "half a body, then silence",
            hold("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"),
            Answer::None,
        ),
        Behavior::actions(
            "half a chunk, then silence",
            hold(&format!("{head}9\r\nabc")),
            Answer::None,
        ),
        Behavior::actions(
            "no last chunk, then silence",
            hold(&format!("{head}3\r\nabc\r\n")),
            Answer::None,
        ),
        Behavior::actions(
            "chunks without an end",
            vec![
                HostileAction::ReadHead,
                send(head),
                HostileAction::Flood(b"3\r\nabc\r\n".repeat(1000)),
            ],
            Answer::None,
        ),
        Behavior::actions(
            "trailers without an end",
            vec![
                HostileAction::ReadHead,
                send(format!("{head}0\r\n")),
                HostileAction::Flood(b"X: y\r\n".repeat(1000)),
            ],
            Answer::Cut,
        ),
        Behavior::actions(
            "an extension without an end",
            vec![
                HostileAction::ReadHead,
                send(format!("{head}3;")),
                HostileAction::Flood(vec![b'x'; 1000]),
            ],
            Answer::Cut,
        ),
    ]
}
