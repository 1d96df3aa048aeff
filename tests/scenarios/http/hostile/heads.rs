//! Status lines, fields and 1xx answers; connections that end before and within the head; targets
//! whose TLS is invalid.

use tunnel_tests::targets::HostileAction;

use super::behavior::{Answer, BAD, Behavior, send};

pub(super) fn behaviors() -> Vec<Behavior> {
    [status_lines(), fields(), interim(), ends(), tls()].concat()
}

const OK: Answer = Answer::Passed(200, "abc");

fn status_lines() -> Vec<Behavior> {
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
        rows.push(Behavior::sends(&name, format!("{line}\r\n{rest}"), BAD));
    }
    rows.push(Behavior::sends(
        "no reason",
        format!("HTTP/1.1 200\r\n{rest}"),
        OK,
    ));
    rows.push(Behavior::sends(
        "version 1.0",
        format!("HTTP/1.0 200 OK\r\n{rest}"),
        OK,
    ));
    let odd = Answer::Passed(999, "abc");
    rows.push(Behavior::sends(
        "status 999",
        format!("HTTP/1.1 999 Odd\r\n{rest}"),
        odd,
    ));
    rows.push(Behavior::sends(
        "frames of HTTP/2",
        b"\0\0\x12\x04\0\0\0\0\0\0\x03\0\0\0d",
        BAD,
    ));
    rows.push(Behavior::sends(
        "a TLS alert",
        b"\x15\x03\x01\0\x02\x02\x50",
        BAD,
    ));
    rows.push(Behavior::sends("binary", [0xff; 512], BAD));
    rows
}

/// Returns a 200 answer with these field lines and the body `abc`.
fn with(fields: &str) -> String {
    format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 3\r\n\r\nabc")
}

fn fields() -> Vec<Behavior> {
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
        rows.push(Behavior::sends(
            &format!("field {field:?}"),
            with(field),
            BAD,
        ));
    }
    let many: String = (0..10_000)
        .map(|index| format!("X-{index}: y\r\n"))
        .collect();
    rows.push(Behavior::sends("10,000 fields", with(&many), BAD));
    rows.push(Behavior::sends(
        "field of 2 MiB",
        with(&format!("X: {}\r\n", "y".repeat(2 << 20))),
        BAD,
    ));
    for (name, line) in [
        ("field", "X".repeat(1000)),
        ("fields", format!("X-{}: y\r\n", "X".repeat(100))),
    ] {
        let actions = vec![
            HostileAction::ReadHead,
            send("HTTP/1.1 200 OK\r\n"),
            HostileAction::Flood(line.into()),
        ];
        rows.push(Behavior::actions(
            &format!("{name} without an end"),
            actions,
            BAD,
        ));
    }
    rows.push(Behavior::actions(
        "head drop by drop",
        vec![
            HostileAction::ReadHead,
            HostileAction::Drip(with("X: y\r\n").into()),
        ],
        OK,
    ));
    rows.push(Behavior::sends(
        "forged X-Tunnel-Error",
        with("X-Tunnel-Error: no_agent\r\n"),
        OK,
    ));
    rows.push(Behavior::sends(
        "Content-Length twice, equal",
        with("Content-Length: 3\r\n"),
        OK,
    ));
    rows.push(Behavior::sends(
        "Content-Length beyond all bounds",
        "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551616\r\n\r\nabc",
        BAD,
    ));
    rows
}

fn interim() -> Vec<Behavior> {
    let hint = "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n";
    let flood = |line: &str| {
        vec![
            HostileAction::ReadHead,
            HostileAction::Flood(line.repeat(20).into()),
        ]
    };
    vec![
        Behavior::sends(
            "fifty hints, then an answer",
            format!("{}{}", hint.repeat(50), with("")),
            OK,
        ),
        Behavior::sends(
            "unexpected 100",
            format!("HTTP/1.1 100 Continue\r\n\r\n{}", with("")),
            OK,
        ),
        Behavior::sends("hint, then the end", hint, BAD),
        Behavior::sends(
            "1xx with a body",
            format!(
                "HTTP/1.1 102 X\r\nContent-Length: 5\r\n\r\nhello{}",
                with("")
            ),
            BAD,
        ),
        Behavior::sends(
            "unexpected 101",
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nabc",
            BAD,
        ),
        Behavior::sends(
            "101 without fields",
            "HTTP/1.1 101 Switching Protocols\r\n\r\n",
            BAD,
        ),
        Behavior::actions("hints without an end", flood(hint), BAD),
        Behavior::actions(
            "100 without an end",
            flood("HTTP/1.1 100 Continue\r\n\r\n"),
            BAD,
        ),
    ]
}

fn ends() -> Vec<Behavior> {
    let mut rows = vec![
        Behavior::actions("end at once", vec![], BAD),
        // The agent's dial may already see the reset.
        Behavior::actions(
            "reset at once",
            vec![HostileAction::Reset],
            Answer::ServerError(502, &["target_bad_response", "target_refused"]),
        ),
        Behavior::actions("end behind the request", vec![HostileAction::ReadHead], BAD),
        Behavior::actions(
            "reset behind the request",
            vec![HostileAction::ReadHead, HostileAction::Reset],
            BAD,
        ),
        Behavior::actions(
            "silence",
            vec![HostileAction::ReadHead, HostileAction::Hold],
            Answer::None,
        ),
        Behavior::actions(
            "half a status line, then silence",
            vec![
                HostileAction::ReadHead,
                send("HTTP/1.1 2"),
                HostileAction::Hold,
            ],
            Answer::None,
        ),
        Behavior::actions(
            "answer before the request",
            vec![send(with("")), HostileAction::ReadHead],
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
        rows.push(Behavior::sends(&format!("end within {name}"), part, BAD));
        let actions = vec![HostileAction::ReadHead, send(part), HostileAction::Reset];
        rows.push(Behavior::actions(
            &format!("reset within {name}"),
            actions,
            BAD,
        ));
    }
    rows
}

fn tls() -> Vec<Behavior> {
    let none = Answer::ServerError(502, &["target_tls"]);
    vec![
        Behavior::actions("TLS: garbage", vec![send([0x41; 200])], none).without_tls(),
        Behavior::actions(
            "TLS: plain HTTP",
            vec![send("HTTP/1.1 400 Bad Request\r\n\r\n")],
            none,
        )
        .without_tls(),
        Behavior::actions(
            "TLS: alert",
            vec![send(b"\x15\x03\x03\0\x02\x02\x28")],
            none,
        )
        .without_tls(),
        Behavior::actions("TLS: end", vec![], none).without_tls(),
        Behavior::actions(
            "TLS: reset",
            vec![HostileAction::Reset],
            Answer::ServerError(502, &["target_tls", "target_refused"]),
        )
        .without_tls(),
        Behavior::actions(
            "TLS: record of 60 KiB",
            vec![send(b"\x16\x03\x03\xf0\0"), send([0; 60 << 10])],
            none,
        )
        .without_tls(),
        Behavior::actions(
            "TLS: silence",
            vec![HostileAction::Hold],
            Answer::ServerError(504, &["target_timeout"]),
        )
        .without_tls(),
        Behavior::sends("TLS: an answer", with(""), OK).inside_tls(),
        Behavior::actions(
            "TLS: end without close_notify behind half an answer",
            vec![
                HostileAction::ReadHead,
                send("HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\nabc"),
                HostileAction::FinBelowTls,
            ],
            Answer::Cut,
        )
        .inside_tls(),
        Behavior::actions(
            "TLS: end without close_notify as the end of an answer",
            vec![
                HostileAction::ReadHead,
                send("HTTP/1.1 200 OK\r\n\r\nabc"),
                HostileAction::FinBelowTls,
            ],
            Answer::Cut,
        )
        .inside_tls(),
        Behavior::actions(
            "TLS: end without close_notify before an answer",
            vec![HostileAction::ReadHead, HostileAction::FinBelowTls],
            BAD,
        )
        .inside_tls(),
    ]
}
