//! Status lines, fields and 1xx answers; ends before and within the head; TLS that is none.

use tunnel_tests::targets::Step;

use super::behaviour::{Answer, BAD, Behaviour, send};

pub(super) fn behaviours() -> Vec<Behaviour> {
    [status_lines(), fields(), interim(), ends(), tls()].concat()
}

const OK: Answer = Answer::Passed(200, "abc");

fn status_lines() -> Vec<Behaviour> {
    let rest = "Content-Length: 3\r\n\r\nabc";
    let mut rows = Vec::new();
    for line in [
        "HTTP/1.1",
        "HTTP/1.1 ",
        "HTTP/1.1 20 OK",
        "HTTP/1.1 2000 OK",
        "HTTP/1.1 abc OK",
        "HTTP/1.1 -20 OK",
        "HTTP/1.1 099 x",
        "HTTP/2.0 200 OK",
        "HTTP/0.9 200 OK",
        "HTTP/1.2 200 OK",
        "http/1.1 200 OK",
        "ICY 200 OK",
        "200 OK",
        " HTTP/1.1 200 OK",
        "HTTP/1.1\t200 OK",
        "HTTP/1.1 200\0OK",
        "HTTP/1.1 200 O\u{1}K",
        "SSH-2.0-OpenSSH_9.6",
        "GET / HTTP/1.1",
    ] {
        let name = format!("status line {line:?}");
        rows.push(Behaviour::sends(&name, format!("{line}\r\n{rest}"), BAD));
    }
    rows.push(Behaviour::sends(
        "no reason",
        format!("HTTP/1.1 200\r\n{rest}"),
        OK,
    ));
    rows.push(Behaviour::sends(
        "version 1.0",
        format!("HTTP/1.0 200 OK\r\n{rest}"),
        OK,
    ));
    let odd = Answer::Passed(999, "abc");
    rows.push(Behaviour::sends(
        "status 999",
        format!("HTTP/1.1 999 Odd\r\n{rest}"),
        odd,
    ));
    rows.push(Behaviour::sends(
        "frames of HTTP/2",
        b"\0\0\x12\x04\0\0\0\0\0\0\x03\0\0\0d",
        BAD,
    ));
    rows.push(Behaviour::sends(
        "a TLS alert",
        b"\x15\x03\x01\0\x02\x02\x50",
        BAD,
    ));
    rows.push(Behaviour::sends("binary", [0xff; 512], BAD));
    rows
}

/// A 200 with these field lines and the body `abc`.
fn with(fields: &str) -> String {
    format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 3\r\n\r\nabc")
}

fn fields() -> Vec<Behaviour> {
    let mut rows = Vec::new();
    for field in [
        "X\r\n",
        "X : y\r\n",
        " X: y\r\n",
        "X: y\r\n z\r\n",
        "X: a\0b\r\n",
        "X: a\rb\r\n",
        ": y\r\n",
        "X\u{1}: y\r\n",
        "Content-Length: 4\r\n",
        "Content-Length: 3, 4\r\n",
        "Content-Length: +3\r\n",
        "Content-Length: -3\r\n",
        "Content-Length: x\r\n",
    ] {
        rows.push(Behaviour::sends(
            &format!("field {field:?}"),
            with(field),
            BAD,
        ));
    }
    let many: String = (0..10_000)
        .map(|index| format!("X-{index}: y\r\n"))
        .collect();
    rows.push(Behaviour::sends("10,000 fields", with(&many), BAD));
    rows.push(Behaviour::sends(
        "field of 2 MiB",
        with(&format!("X: {}\r\n", "y".repeat(2 << 20))),
        BAD,
    ));
    for (name, line) in [
        ("field", "X".repeat(1000)),
        ("fields", format!("X-{}: y\r\n", "X".repeat(100))),
    ] {
        let steps = vec![
            Step::ReadHead,
            send("HTTP/1.1 200 OK\r\n"),
            Step::Flood(line.into()),
        ];
        rows.push(Behaviour::steps(
            &format!("{name} without an end"),
            steps,
            BAD,
        ));
    }
    rows.push(Behaviour::steps(
        "head drop by drop",
        vec![Step::ReadHead, Step::Drip(with("X: y\r\n").into())],
        OK,
    ));
    rows.push(Behaviour::sends(
        "forged X-Tunnel-Error",
        with("X-Tunnel-Error: no_agent\r\n"),
        OK,
    ));
    rows.push(Behaviour::sends(
        "Content-Length twice, equal",
        with("Content-Length: 3\r\n"),
        OK,
    ));
    rows.push(Behaviour::sends(
        "Content-Length beyond all bounds",
        "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551616\r\n\r\nabc",
        BAD,
    ));
    rows
}

fn interim() -> Vec<Behaviour> {
    let hint = "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n";
    let flood = |line: &str| vec![Step::ReadHead, Step::Flood(line.repeat(20).into())];
    vec![
        Behaviour::sends(
            "fifty hints, then an answer",
            format!("{}{}", hint.repeat(50), with("")),
            OK,
        ),
        Behaviour::sends(
            "100 that nobody waits for",
            format!("HTTP/1.1 100 Continue\r\n\r\n{}", with("")),
            OK,
        ),
        Behaviour::sends("hint, then the end", hint, BAD),
        Behaviour::sends(
            "1xx with a body",
            format!(
                "HTTP/1.1 102 X\r\nContent-Length: 5\r\n\r\nhello{}",
                with("")
            ),
            BAD,
        ),
        Behaviour::sends(
            "101 that nobody asked for",
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nabc",
            BAD,
        ),
        Behaviour::sends(
            "101 without fields",
            "HTTP/1.1 101 Switching Protocols\r\n\r\n",
            BAD,
        ),
        Behaviour::steps("hints without an end", flood(hint), BAD),
        Behaviour::steps(
            "100 without an end",
            flood("HTTP/1.1 100 Continue\r\n\r\n"),
            BAD,
        ),
    ]
}

fn ends() -> Vec<Behaviour> {
    let mut rows = vec![
        Behaviour::steps("end at once", vec![], BAD),
        // The agent's dial may see it already.
        Behaviour::steps(
            "reset at once",
            vec![Step::Reset],
            Answer::Told(502, &["target_bad_response", "target_refused"]),
        ),
        Behaviour::steps("end behind the request", vec![Step::ReadHead], BAD),
        Behaviour::steps(
            "reset behind the request",
            vec![Step::ReadHead, Step::Reset],
            BAD,
        ),
        Behaviour::steps("silence", vec![Step::ReadHead, Step::Hold], Answer::None),
        Behaviour::steps(
            "half a status line, then silence",
            vec![Step::ReadHead, send("HTTP/1.1 2"), Step::Hold],
            Answer::None,
        ),
        Behaviour::steps(
            "answer before the request",
            vec![send(with("")), Step::ReadHead],
            Answer::PassedOrCut(200, "abc"),
        ),
    ];
    for (name, part) in [
        ("the version", "HTTP/1"),
        ("the status line", "HTTP/1.1 200 OK"),
        ("a field", "HTTP/1.1 200 OK\r\nContent-Le"),
        ("the last line", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n"),
        (
            "the last CR LF",
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r",
        ),
    ] {
        rows.push(Behaviour::sends(&format!("end within {name}"), part, BAD));
        let steps = vec![Step::ReadHead, send(part), Step::Reset];
        rows.push(Behaviour::steps(
            &format!("reset within {name}"),
            steps,
            BAD,
        ));
    }
    rows
}

fn tls() -> Vec<Behaviour> {
    let none = Answer::Told(502, &["target_tls"]);
    vec![
        Behaviour::steps("TLS: garbage", vec![send([0x41; 200])], none).without_tls(),
        Behaviour::steps(
            "TLS: plain HTTP",
            vec![send("HTTP/1.1 400 Bad Request\r\n\r\n")],
            none,
        )
        .without_tls(),
        Behaviour::steps(
            "TLS: alert",
            vec![send(b"\x15\x03\x03\0\x02\x02\x28")],
            none,
        )
        .without_tls(),
        Behaviour::steps("TLS: end", vec![], none).without_tls(),
        Behaviour::steps(
            "TLS: reset",
            vec![Step::Reset],
            Answer::Told(502, &["target_tls", "target_refused"]),
        )
        .without_tls(),
        Behaviour::steps(
            "TLS: record of 60 KiB",
            vec![send(b"\x16\x03\x03\xf0\0"), send([0; 60 << 10])],
            none,
        )
        .without_tls(),
        Behaviour::steps(
            "TLS: silence",
            vec![Step::Hold],
            Answer::Told(504, &["target_timeout"]),
        )
        .without_tls(),
        Behaviour::sends("TLS: an answer", with(""), OK).inside_tls(),
        Behaviour::steps(
            "TLS: end without close_notify behind half an answer",
            vec![
                Step::ReadHead,
                send("HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\nabc"),
                Step::FinBelowTls,
            ],
            Answer::Cut,
        )
        .inside_tls(),
        Behaviour::steps(
            "TLS: end without close_notify as the end of an answer",
            vec![
                Step::ReadHead,
                send("HTTP/1.1 200 OK\r\n\r\nabc"),
                Step::FinBelowTls,
            ],
            Answer::Cut,
        )
        .inside_tls(),
        Behaviour::steps(
            "TLS: end without close_notify before an answer",
            vec![Step::ReadHead, Step::FinBelowTls],
            BAD,
        )
        .inside_tls(),
    ]
}
