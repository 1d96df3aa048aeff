//! Request lines, field lines and Host that a target might read differently than the server (RFC
//! 9112, sections 2 to 5).

use super::case::{Case, Expect, HIDDEN, Want, get};

pub(super) fn cases() -> Vec<Case> {
    [
        request_lines(),
        line_ends(),
        names(),
        values(),
        hosts(),
        sizes(),
    ]
    .concat()
}

fn routed(method: &str, target: &str) -> Expect {
    Expect::Routed(vec![Want::own(method, target, "")])
}

/// Returns a request with this request line.
fn line(line: &str) -> String {
    format!("{line}\r\nHost: worker-1:@port\r\nConnection: close\r\n\r\n")
}

fn request_lines() -> Vec<Case> {
    // The authority of the absolute form replaces Host.
    let other = Want {
        own: false,
        ..Want::own("GET", "/g", "")
    };
    let absolute = |node: &str, want| {
        let bytes = line(&format!("GET http://{node}:@port/g HTTP/1.1"));
        Case::new(&format!("URL of {node}"), bytes, Expect::Routed(vec![want]))
    };
    let mut cases = vec![
        absolute("worker-1", Want::own("GET", "/g", "")),
        absolute("worker-2", other),
    ];
    for wrong in [
        "GET",
        "GET /",
        "GET /g HTTP/1.1 x",
        "GET  /g HTTP/1.1",
        "GET /g  HTTP/1.1",
        "GET\t/g\tHTTP/1.1",
        "GET /g\tHTTP/1.1",
        " GET /g HTTP/1.1",
        "GET /a b HTTP/1.1",
        "GET /g HTTP/1.1 ",
        "GET /g HTTP/2.0",
        "GET /g HTTP/1.2",
        "GET /g HTTP/0.9",
        "GET /g HTTP/11",
        "GET /g http/1.1",
        "GET /g HTTP/1.10",
        "GET /g HTTP /1.1",
        "GET /g HTP/1.1",
        "G(T /g HTTP/1.1",
        "G\u{e9}T /g HTTP/1.1",
        "GE\0T /g HTTP/1.1",
        "GET /g\0 HTTP/1.1",
        "GET /\u{1} HTTP/1.1",
        "GET /\u{7f} HTTP/1.1",
        "GET /g\rHTTP/1.1",
        "GET \r/g HTTP/1.1",
        "GET g HTTP/1.1",
        "GET worker-1 HTTP/1.1",
        "GET * HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "GET worker-1:@port/g HTTP/1.1",
        "GET http://user@worker-1:@port/g HTTP/1.1",
        "GET http://worker-1:@port:1/g HTTP/1.1",
        "GET http:///g HTTP/1.1",
        "GET https://worker-1:@port/g HTTP/1.1",
        "GET //worker-2:@port HTTP/1.1x",
        "GET ftp://worker-2:@port/ HTTP/1.1",
        "CONNECT worker-1:@port HTTP/1.1",
        "CONNECT worker-2:@port HTTP/1.1",
        "CONNECT / HTTP/1.1",
        "GET ?x HTTP/1.1",
        "GET #x HTTP/1.1",
        "PRI * HTTP/2.0",
        "GET /\u{e9} HTTP/1.1",
        "GET /\u{2028} HTTP/1.1",
    ] {
        let name = format!("request line {wrong:?}");
        cases.push(Case::refused(&name, line(wrong)));
    }
    for (method, target) in [
        ("GET", "/g"),
        ("get", "/g"),
        ("M-SEARCH", "/g"),
        ("GET", "//worker-2/x"),
        ("GET", "/../a/./b?c=%00%0d%0a"),
        ("GET", "/?a=http://worker-2/"),
    ] {
        let right = format!("{method} {target} HTTP/1.1");
        let name = format!("request line {right:?}");
        cases.push(Case::new(&name, line(&right), routed(method, target)));
    }
    // A fragment is never sent (RFC 9110, section 7.1), so the server removes it.
    let fragment = line("GET /g#f HTTP/1.1");
    cases.push(Case::new("fragment", fragment, routed("GET", "/g")));
    cases
}

fn line_ends() -> Vec<Case> {
    let mut cases = Vec::new();
    for wrong in [
        // Bare CR, two CR, and LF CR.
        "GET /g HTTP/1.1\rHost: worker-1:@port\r\n\r\n",
        "GET /g HTTP/1.1\r\nHost: worker-1:@port\rX: y\r\n\r\n",
        &format!("GET /g HTTP/1.1\r\nHost: worker-1:@port\r\n\r{HIDDEN}"),
        "GET /g HTTP/1.1\r\r\nHost: worker-1:@port\r\n\r\n",
        "GET /g HTTP/1.1\n\rHost: worker-1:@port\n\r\n\r",
        // Folded fields, and a line of spaces.
        "GET /g HTTP/1.1\r\nHost: worker-1:@port\r\nX: y\r\n z\r\n\r\n",
        "GET /g HTTP/1.1\r\nHost: worker-1:@port\r\nX: y\r\n\tz\r\n\r\n",
        "GET /g HTTP/1.1\r\n Host: worker-1:@port\r\n\r\n",
        "GET /g HTTP/1.1\r\nHost:\r\n worker-1:@port\r\n\r\n",
        &format!("GET /g HTTP/1.1\r\nHost: worker-1:@port\r\n \r\n{HIDDEN}"),
        // RFC 9112, section 2.2, allows a recipient to accept LF alone. Not all recipients do.
        "GET /g HTTP/1.1\nHost: worker-1:@port\nConnection: close\n\n",
        "GET /g HTTP/1.1\nHost: worker-1:@port\r\nConnection: close\r\n\r\n",
        "GET /g HTTP/1.1\r\nHost: worker-1:@port\nConnection: close\r\n\r\n",
        "GET /g HTTP/1.1\r\nHost: worker-1:@port\r\nConnection: close\r\n\n",
    ] {
        cases.push(Case::refused(&format!("line ends {wrong:?}"), wrong));
    }
    let sane = line("GET /g HTTP/1.1");
    let (behind_line, head) = (format!("\r\n{sane}"), sane.replace("\r\n\r\n", "\r\n"));
    cases.extend([
        Case::new("empty line before it", behind_line, routed("GET", "/g")),
        Case::new("head that never ends", head, Expect::Gone),
        Case::new("nothing at all", "", Expect::Gone),
    ]);
    cases
}

fn names() -> Vec<Case> {
    let mut cases = Vec::new();
    for byte in *b"\"(),/;<=>?@[\\]{}\x01\x0b\x7f\x80\xff" {
        let field = [b"X".as_slice(), &[byte], b"Y: z\r\n"].concat();
        let name = format!("byte {byte:#04x} in a field's name");
        cases.push(Case::refused(&name, get(field)));
    }
    for (name, field) in [
        ("space before the colon", "X : y\r\n"),
        ("tab before the colon", "X\t: y\r\n"),
        ("space before the name", " X: y\r\n"),
        ("no colon", "X\r\n"),
        ("no name", ": y\r\n"),
        ("NUL in the name", "X\0: y\r\n"),
        ("space in the name", "X Y: z\r\n"),
        ("space behind Host", "Host : worker-2:@port\r\n"),
        (
            "space behind a selector",
            "X-Tunnel-Proxy-Host : worker-2\r\n",
        ),
        ("space behind Content-Length", "Content-Length : 3\r\n"),
    ] {
        cases.push(Case::refused(name, get(field)));
    }
    for odd in [
        "!#$%&'*+-.^_`|~9A: y\r\n",
        "X:y\r\n",
        "X: \r\n",
        "X:\r\n",
        "X: y \t \r\n",
    ] {
        let name = format!("field {odd:?}");
        cases.push(Case::new(&name, get(odd), routed("GET", "/g")));
    }
    cases
}

fn values() -> Vec<Case> {
    let mut cases = Vec::new();
    for byte in [0_u8, 1, 7, 8, 0x0b, 0x0c, 0x0e, 0x1b, 0x1f, 0x7f] {
        let field = [b"X: a".as_slice(), &[byte], b"b\r\n"].concat();
        let name = format!("byte {byte:#04x} in a field's value");
        cases.push(Case::refused(&name, get(field)));
    }
    for value in [
        b"a\tb".as_slice(),
        b"a  b",
        b"\xe9",
        b"\xff\xfe",
        b"a, b;c=\"d\\\"e\"",
    ] {
        let field = [b"X: ", value, b"\r\n"].concat();
        let name = format!("value {:?}", String::from_utf8_lossy(value));
        cases.push(Case::new(&name, get(field), routed("GET", "/g")));
    }
    cases
}

/// Returns cases of the Host field. The selectors have scenarios of their own.
fn hosts() -> Vec<Case> {
    let with_hosts = |hosts: &str| format!("GET /g HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n");
    let mut cases = Vec::new();
    for host in [
        "",
        "worker-1:@port, worker-2:@port",
        "worker-1:@port worker-2:@port",
        "worker-1:@port@worker-2:@port",
        "worker-2@worker-1:@port",
        "worker-1:@port/",
        "worker-1:@port:@port",
        "worker-1:0",
        "worker-1:+80",
        "worker-1:99999",
        "http://worker-1:@port",
        "[worker-1]:@port",
        "worker_1:@port",
        "worker-1:@port#",
        "worker-1:@port?",
        "worker-1%00:@port",
        "*:@port",
        "-:@port",
        "worker-1:80 ,",
        "worker-1\t:@port",
    ] {
        let bytes = with_hosts(&format!("Host: {host}\r\n"));
        cases.push(Case::refused(&format!("Host {host:?}"), bytes));
    }
    for hosts in [
        "",
        "Host: worker-1:@port\r\nHost: worker-1:@port\r\n",
        "Host: worker-1:@port\r\nHost: worker-2:@port\r\n",
        "host: worker-1:@port\r\nHOST: worker-2:@port\r\n",
    ] {
        let name = format!("no Host or two: {hosts:?}");
        cases.push(Case::refused(&name, with_hosts(hosts)));
    }
    for host in ["WORKER-1:@port", "worker-1.:@port", " worker-1:@port "] {
        let (name, bytes) = (
            format!("Host {host:?}"),
            with_hosts(&format!("Host: {host}\r\n")),
        );
        cases.push(Case::new(&name, bytes, routed("GET", "/g")));
    }
    let named = line("GET /g HTTP/1.1").replace("close", "close, Host");
    let name = "Host named by Connection";
    cases.push(Case::new(name, named, routed("GET", "/g")));
    cases
}

fn sizes() -> Vec<Case> {
    let many = |n: usize| -> String { (0..n).map(|index| format!("X-{index}: y\r\n")).collect() };
    let value = get(format!("X: {}\r\n", "y".repeat(1 << 20)));
    let name = get(format!("{}: y\r\n", "X".repeat(70 << 10)));
    let [long, longer] = [65_000, 65_001].map(|bytes| format!("/{}", "x".repeat(bytes - 1)));
    let [fits, exceeds] = [&long, &longer].map(|target| line(&format!("GET {target} HTTP/1.1")));
    let method = "X".repeat(2 << 10);
    let with_method = line(&format!("{method} / HTTP/1.1"));
    vec![
        Case::new("field of 1 MiB", value, Expect::Refused(431)),
        Case::new("name of 70 KiB", name, Expect::Refused(431)),
        Case::new("1,025 fields", get(many(1_023)), Expect::Refused(431)),
        Case::new("10,000 fields", get(many(10_000)), Expect::Refused(431)),
        Case::new("target of 65,000 bytes", fits, routed("GET", &long)),
        Case::new("target of 65,001 bytes", exceeds, Expect::Refused(414)),
        Case::new("method of 2 KiB", with_method, routed(&method, "/")),
    ]
}
