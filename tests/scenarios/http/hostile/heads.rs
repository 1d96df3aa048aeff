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
    for (line, answer) in [
        ("HTTP/1.1 200", OK),
        ("HTTP/1.0 200 OK", OK),
        ("HTTP/1.1 999 Odd", Answer::Passed(999, "abc")),
    ] {
        let name = format!("status line {line:?}");
        rows.push(Behavior::sends(&name, format!("{line}\r\n{rest}"), answer));
    }
    let frames = b"\0\0\x12\x04\0\0\0\0\0\0\x03\0\0\0d";
    rows.extend([
        Behavior::sends("frames of HTTP/2", frames, BAD),
        Behavior::sends("a TLS alert", b"\x15\x03\x01\0\x02\x02\x50", BAD),
        Behavior::sends("binary", [0xff; 512], BAD),
    ]);
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
        let name = format!("field {field:?}");
        rows.push(Behavior::sends(&name, with(field), BAD));
    }
    let many: String = (0..10_000)
        .map(|index| format!("X-{index}: y\r\n"))
        .collect();
    let thousand: String = many.split_inclusive('\n').take(1000).collect();
    for (name, line) in [
        ("field", "X".repeat(1000)),
        ("fields", format!("X-{}: y\r\n", "X".repeat(100))),
    ] {
        let name = format!("{name} without an end");
        let flood = HostileAction::Flood(line.into());
        rows.push(Behavior::sends(&name, "HTTP/1.1 200 OK\r\n", BAD).then(flood));
    }
    let large = with(&format!("X: {}\r\n", "y".repeat(2 << 20)));
    let forged = with("X-Tunnel-Error: no_agent\r\n");
    let equal = with("Content-Length: 3\r\n");
    let huge = "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551616\r\n\r\nabc";
    rows.extend([
        Behavior::sends("1,000 fields", with(&thousand), OK),
        Behavior::sends("10,000 fields", with(&many), BAD),
        Behavior::sends("field of 2 MiB", large, BAD),
        Behavior::drips("head drop by drop", with("X: y\r\n"), OK),
        Behavior::sends("forged X-Tunnel-Error", forged, OK),
        Behavior::sends("Content-Length twice, equal", equal, OK),
        Behavior::sends("Content-Length beyond all bounds", huge, BAD),
    ]);
    rows
}

fn interim() -> Vec<Behavior> {
    let hint = "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n";
    let goes_on = "HTTP/1.1 100 Continue\r\n\r\n";
    let body = "HTTP/1.1 102 X\r\nContent-Length: 5\r\n\r\nhello";
    let switch = "HTTP/1.1 101 Switching Protocols\r\n\r\n";
    let upgrade = switch.replacen("\r\n", "\r\nConnection: Upgrade\r\nUpgrade: x\r\n", 1) + "abc";
    let flood = |line: &str| {
        let flood = HostileAction::Flood(line.repeat(20).into());
        vec![HostileAction::ReadHead, flood]
    };
    let then_answer = |start: &str| format!("{start}{}", with(""));
    let hints = then_answer(&hint.repeat(50));
    vec![
        Behavior::sends("fifty hints, then an answer", hints, OK),
        Behavior::sends("unexpected 100", then_answer(goes_on), OK),
        Behavior::sends("hint, then the end", hint, BAD),
        Behavior::sends("1xx with a body", then_answer(body), BAD),
        Behavior::sends("unexpected 101", upgrade, BAD),
        Behavior::sends("101 without fields", switch, BAD),
        Behavior::actions("hints without an end", flood(hint), BAD),
        Behavior::actions("100 without an end", flood(goes_on), BAD),
    ]
}

fn ends() -> Vec<Behavior> {
    // The agent's dial may already see the reset.
    let refused = Answer::ServerError(502, &["target_bad_response", "target_refused"]);
    let half = "half a status line, then silence";
    let early = vec![send(with("")), HostileAction::ReadHead];
    let passed_or_cut = Answer::PassedOrCut(200, "abc");
    let reads = |name: &str, answer| Behavior::actions(name, vec![HostileAction::ReadHead], answer);
    let mut rows = vec![
        Behavior::actions("end at once", vec![], BAD),
        Behavior::actions("reset at once", vec![HostileAction::Reset], refused),
        reads("end behind the request", BAD),
        reads("reset behind the request", BAD).then(HostileAction::Reset),
        reads("silence", Answer::None).then(HostileAction::Hold),
        Behavior::sends(half, "HTTP/1.1 2", Answer::None).then(HostileAction::Hold),
        Behavior::actions("answer before the request", early, passed_or_cut),
    ];
    for (name, part) in [
        ("the version", "HTTP/1"),
        ("the status line", "HTTP/1.1 200 OK"),
        ("a field", "HTTP/1.1 200 OK\r\nContent-Le"),
        ("the last line", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n"),
        ("the end", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r"),
    ] {
        rows.extend(Behavior::ends(&format!("within {name}"), part, BAD));
    }
    rows
}

fn tls() -> Vec<Behavior> {
    let none = Answer::ServerError(502, &["target_tls"]);
    let refused = Answer::ServerError(502, &["target_tls", "target_refused"]);
    let timeout = Answer::ServerError(504, &["target_timeout"]);
    let without_tls = [
        ("garbage", vec![send([0x41; 200])], none),
        (
            "plain",
            vec![send("HTTP/1.1 400 Bad Request\r\n\r\n")],
            none,
        ),
        ("alert", vec![send(b"\x15\x03\x03\0\x02\x02\x28")], none),
        ("end", vec![], none),
        ("reset", vec![HostileAction::Reset], refused),
        (
            "record of 60 KiB",
            vec![send(b"\x16\x03\x03\xf0\0"), send([0; 60 << 10])],
            none,
        ),
        ("silence", vec![HostileAction::Hold], timeout),
    ];
    let mut rows = vec![Behavior::sends("TLS: an answer", with(""), OK).inside_tls()];
    for (name, actions, answer) in without_tls {
        let name = format!("TLS: {name}");
        rows.push(Behavior::actions(&name, actions, answer).without_tls());
    }
    let half = "HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\nabc";
    let whole = "HTTP/1.1 200 OK\r\n\r\nabc";
    for (name, bytes, answer) in [
        ("behind half an answer", half, Answer::Cut),
        ("as the end of an answer", whole, Answer::Cut),
        ("before an answer", "", BAD),
    ] {
        let name = format!("TLS: end without close_notify {name}");
        let row = Behavior::sends(&name, bytes, answer).then(HostileAction::FinBelowTls);
        rows.push(row.inside_tls());
    }
    rows
}
