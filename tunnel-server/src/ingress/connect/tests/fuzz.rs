//! Random bytes as heads on the CONNECT listener. The bytes pass through hyper's parser and the
//! request path. The generator and the number of inputs are the same as for the HTTP listeners.

use std::cell::RefCell;
use std::convert::Infallible;
use std::net::Ipv6Addr;
use std::task::{Context, Waker};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;

use crate::ingress::connect::table::authorize_anonymous;
use crate::ingress::error::ProxyError;
use crate::ingress::http::builder;
use crate::ingress::http::head_check::size::HeadLimits;
use crate::ingress::http::response::ResponseBody;
use crate::ingress::http::tests::fuzz::exchange::{POLICY, ROUTES, Wire};
use crate::ingress::http::tests::fuzz::run;
use tunnel_routing::decision::proxy::{ProxyRequest, RequestKind};
use tunnel_routing::dial_policy::ClusterNetworks;
use tunnel_routing::policy::Route;

/// Heads of ordinary callers and of attackers.
const HEADS: &[&str] = &[
    "CONNECT worker-1:9100 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "CONNECT worker-1:10250 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n\u{16}\u{3}\u{1} and bytes",
    "CONNECT 192.0.2.1:9100 HTTP/1.1\r\nHost: x\r\nUser-Agent: Go-http-client/1.1\r\n\r\n",
    "CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\n\r\n",
    "CONNECT WORKER-2.:9100 HTTP/1.0\r\nProxy-Authorization: Basic dTpw\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    "CONNECT hook.default.svc:443 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    "CONNECT worker-1:9100 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "GET http://worker-1:9100/metrics?a=b HTTP/1.1\r\nHost: worker-1:9100\r\n\r\n",
    "HEAD http://192.0.2.1:9100/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "GET http://worker-1:9100/exec HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "POST http://worker-1:9100/ HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi",
    "GET http://u:p@worker-1:9100/ HTTP/1.1\r\nHost: x\r\n\r\nCONNECT worker-2:9100 HTTP/1.1\r\n\r\n",
];

/// The observed result of one request.
struct Observed {
    method: String,
    result: Result<(ProxyRequest, bool), ProxyError>,
}

fn judge(request: &Request<Incoming>) -> Observed {
    let proxy_request = ProxyRequest::of(request.method(), request.uri(), request.headers());
    let result = proxy_request
        .map_err(ProxyError::from)
        .and_then(|proxy_request| {
            let requested =
                proxy_request.resolve(&ROUTES, &ClusterNetworks::default(), |_| false)?;
            let route = authorize_anonymous(&POLICY, requested)?;
            Ok((proxy_request, matches!(route, Route::Agent(_))))
        });
    Observed {
        method: request.method().to_string(),
        result,
    }
}

#[test]
fn connect_heads_lead_where_they_say_and_lose_no_byte() {
    run(HEADS, &[], |input, _| check(input));
}

/// Returns whether the first request would have been forwarded.
fn check(input: &[u8]) -> bool {
    let wire = Wire::new(input);
    let observed = RefCell::new(Vec::new());
    let service = service_fn(|request: Request<Incoming>| {
        let judged = judge(&request);
        let response = match &judged.result {
            Ok(_) => Response::new(ResponseBody::empty()),
            Err(failure) => failure.response(),
        };
        observed.borrow_mut().push(judged);
        std::future::ready(Ok::<_, Infallible>(response))
    });
    let mut builder = builder(HeadLimits::of_connection(usize::MAX));
    builder.half_close(true);
    let mut connection = builder.serve_connection(wire.clone(), service);
    let mut cx = Context::from_waker(Waker::noop());
    let mut before = (usize::MAX, 0);
    let mut ended = false;
    while !ended {
        ended = connection.poll_without_shutdown(&mut cx).is_ready();
        let now = (wire.progress(), observed.borrow().len());
        if std::mem::replace(&mut before, now) == now {
            break;
        }
    }
    let read_ahead = connection.into_parts().read_buf;
    let observed = observed.into_inner();
    let Some(Observed { method, result }) = observed.first() else {
        return false;
    };
    let Ok((proxy_request, by_agent)) = result else {
        return false;
    };
    match proxy_request.kind {
        RequestKind::Connect => {
            assert_eq!(method, "CONNECT");
            assert_eq!(
                observed.len(),
                1,
                "what follows is the target's, and no request"
            );
            let output = wire.output();
            let output = String::from_utf8_lossy(&output);
            let granted = output.strip_prefix("HTTP/1.").map(|rest| &rest[1..]);
            // The field repeats the caller's text.
            let plain = [" 200 OK\r\n\r\n", " 200 OK\r\nConnection: close\r\n\r\n"];
            assert!(
                granted.is_some_and(|head| plain.contains(&head)),
                "{output:?}"
            );
            let tail = [&read_ahead[..], &wire.unread()].concat();
            check_split(input, &tail);
            check_request(input, proxy_request);
        }
        RequestKind::Read => {
            assert!(method == "GET" || method == "HEAD", "{method}");
            let text = String::from_utf8_lossy(input).to_lowercase();
            let lines = text.lines().skip_while(|line| line.is_empty());
            let mut head = lines.take_while(|line| !line.is_empty());
            let upgrades = head.any(|line| line.starts_with("upgrade:"));
            assert!(!upgrades, "an upgrade was passed");
        }
    }
    *by_agent || proxy_request.kind == RequestKind::Connect
}

/// Checks that the head ends with its empty line, and that the rest follows byte for byte.
fn check_split(input: &[u8], tail: &[u8]) {
    assert!(input.ends_with(tail), "bytes were lost");
    let head = &input[..input.len() - tail.len()];
    assert!(
        head.ends_with(b"\n\r\n") || head.ends_with(b"\n\n"),
        "a byte of the tunnel was taken"
    );
    let lines = head.split(|byte| *byte == b'\n');
    let lines = lines.map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let lines: Vec<_> = lines.skip_while(|line| line.is_empty()).collect();
    let first_empty = lines.iter().position(|line| line.is_empty());
    // Bytes after the last line end are not a line.
    assert_eq!(
        first_empty,
        Some(lines.len() - 2),
        "a byte of the tunnel was taken for a field"
    );
}

/// Checks that the target comes from the request line, regardless of the fields.
fn check_request(input: &[u8], proxy_request: &ProxyRequest) {
    let text = String::from_utf8_lossy(input);
    let line = text
        .lines()
        .find(|line| !line.is_empty())
        .unwrap_or_default();
    let target = line.split(' ').nth(1).unwrap_or_default();
    let (host, port) = target.rsplit_once(':').expect("a port");
    assert_eq!(port.parse(), Ok(proxy_request.port.get()), "{target}");
    let result = proxy_request.host.to_string();
    let bare = host.trim_matches(['[', ']']);
    match bare.parse::<Ipv6Addr>() {
        Ok(address) => {
            let address = address.to_canonical().to_string();
            assert_eq!(result.trim_matches(['[', ']']), address);
        }
        Err(_other) => {
            let host = host.to_ascii_lowercase();
            assert_eq!(result, host.strip_suffix('.').unwrap_or(&host), "{target}");
        }
    }
}
