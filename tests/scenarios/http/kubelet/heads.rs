//! Requests that kube-apiserver and similar clients send to a kubelet, byte for byte.
//!
//! Paths are in `kubernetes/kubernetes` unless stated otherwise. Go's `http.Request.Write` writes
//! Host, User-Agent and Content-Length first, then all other fields sorted by name
//! (`net/http/request.go` `Request.write`, `net/http/header.go` `Header.writeSubset`). A POST
//! without a body has `Content-Length: 0` (`net/http/transfer.go` `shouldSendContentLength`).

use tunnel_tests::client::{RawRequest, WEBSOCKET_KEY};

/// Returns a head with these lines. `HOST` in them stands for `host`. For logs and scrapes, this is
/// the node and its port. For commands, port-forward and the node proxy, kube-apiserver forwards
/// the Host that its user wrote (`upgradeaware.go`: `UseLocationHost` is false), such as
/// `10.77.100.3:6443`. If kube-apiserver translates a WebSocket to SPDY by itself
/// (`staging/src/k8s.io/apiserver/pkg/util/proxy/streamtranslator.go`), kube-apiserver writes the
/// node's Host.
fn head(host: &str, lines: &[&str]) -> RawRequest {
    let lines: String = lines
        .iter()
        .map(|line| format!("{}\r\n", line.replace("HOST", host)))
        .collect();
    RawRequest::raw(format!("{lines}\r\n"))
}

/// Returns the request of `kubectl logs`: `pkg/registry/core/pod/strategy.go` `LogLocation`, sent
/// by `staging/src/k8s.io/apiserver/pkg/registry/generic/rest/streamer.go`
/// `LocationStreamer.InputStream`. Go's transport requests gzip by itself.
pub(crate) fn logs(host: &str, query: &str) -> RawRequest {
    let request_line = format!("GET /containerLogs/default/web-0/app{query} HTTP/1.1");
    let agent = "User-Agent: Go-http-client/1.1";
    head(
        host,
        &[&request_line, "Host: HOST", agent, "Accept-Encoding: gzip"],
    )
}

/// Returns the request of `kubectl exec` and `attach` over SPDY:
/// `pkg/registry/core/pod/strategy.go` `streamLocation` and `streamParams` (`url.Values.Encode`
/// sorts). The proxy is `staging/src/k8s.io/apimachinery/pkg/util/proxy/upgradeaware.go`
/// `tryUpgrade` and `dial`. The proxy keeps kubectl's fields
/// (`staging/src/k8s.io/client-go/transport/spdy/spdy.go` `Negotiate`,
/// `staging/src/k8s.io/apimachinery/pkg/util/httpstream/spdy/roundtripper.go` `RoundTrip`) and adds
/// X-Forwarded-For.
pub(crate) fn command_over_spdy(host: &str, verb: &str, query: &str) -> RawRequest {
    let request_line = format!("POST /{verb}/default/web-0/app?{query} HTTP/1.1");
    head(
        host,
        &[
            &request_line,
            "Host: HOST",
            "User-Agent: kubectl/v1.33.1 (linux/amd64) kubernetes/8adc0f0",
            "Content-Length: 0",
            "Connection: Upgrade",
            "Kubectl-Command: kubectl exec",
            "Kubectl-Session: 3b7a6f1e-9c1d-4a56-8f0e-6f3f0f4f2a11",
            "Upgrade: SPDY/3.1",
            "X-Forwarded-For: 10.0.0.9",
            "X-Stream-Protocol-Version: v5.channel.k8s.io",
            "X-Stream-Protocol-Version: v4.channel.k8s.io",
            "X-Stream-Protocol-Version: v3.channel.k8s.io",
            "X-Stream-Protocol-Version: v2.channel.k8s.io",
            "X-Stream-Protocol-Version: channel.k8s.io",
        ],
    )
}

/// Returns the request of `kubectl exec` and `attach` if the WebSocket reaches the kubelet (KEP
/// 4006): `staging/src/k8s.io/client-go/tools/remotecommand/websocket.go` `NewWebSocketExecutor`
/// and `staging/src/k8s.io/client-go/transport/websocket/roundtripper.go` `Negotiate`, through
/// `tryUpgrade` as above.
pub(crate) fn command_over_websocket(host: &str, verb: &str, query: &str) -> RawRequest {
    let request_line = format!("GET /{verb}/default/web-0/app?{query} HTTP/1.1");
    let key = format!("Sec-Websocket-Key: {WEBSOCKET_KEY}");
    head(
        host,
        &[
            &request_line,
            "Host: HOST",
            "User-Agent: kubectl/v1.36.0 (linux/amd64) kubernetes/ab12cd3",
            "Connection: Upgrade",
            "Kubectl-Command: kubectl exec",
            &key,
            "Sec-Websocket-Protocol: v5.channel.k8s.io",
            "Sec-Websocket-Version: 13",
            "Upgrade: websocket",
            "X-Forwarded-For: 10.0.0.9",
        ],
    )
}

/// Returns the request of `kubectl port-forward`: `pkg/registry/core/pod/strategy.go`
/// `PortForwardLocation`; `staging/src/k8s.io/client-go/tools/portforward/portforward.go`
/// `PortForwardProtocolV1Name`.
pub(crate) fn port_forward(host: &str) -> RawRequest {
    head(
        host,
        &[
            "POST /portForward/default/web-0 HTTP/1.1",
            "Host: HOST",
            "User-Agent: kubectl/v1.33.1 (linux/amd64) kubernetes/8adc0f0",
            "Content-Length: 0",
            "Connection: Upgrade",
            "Kubectl-Command: kubectl port-forward",
            "Upgrade: SPDY/3.1",
            "X-Forwarded-For: 10.0.0.9",
            "X-Stream-Protocol-Version: portforward.k8s.io",
        ],
    )
}

/// Returns the request of `kubectl get --raw /api/v1/nodes/NODE/proxy/PATH`:
/// `pkg/registry/core/node/rest/proxy.go` `ProxyREST.Connect`, then `upgradeaware.go` `ServeHTTP`
/// (Go's `httputil.ReverseProxy` adds X-Forwarded-For) and
/// `staging/src/k8s.io/apimachinery/pkg/util/proxy/transport.go` `RoundTrip` (X-Forwarded-Uri).
pub(crate) fn node_proxy(host: &str, method: &str, path: &str) -> RawRequest {
    let request_line = format!("{method} {path} HTTP/1.1");
    let uri = format!("X-Forwarded-Uri: /api/v1/nodes/worker-1/proxy{path}");
    let mut lines = vec![
        request_line.as_str(),
        "Host: HOST",
        "User-Agent: kubectl/v1.33.1 (linux/amd64) kubernetes/8adc0f0",
    ];
    if method == "POST" {
        lines.push("Content-Length: 0");
    }
    lines.extend([
        "Accept: application/json, */*",
        "Accept-Encoding: gzip",
        "X-Forwarded-For: 10.0.0.9",
        &uri,
    ]);
    head(host, &lines)
}

/// Returns a scrape of the kubelet with a ServiceAccount's token: `prometheus/prometheus`
/// `scrape/scrape.go` `targetScraper.scrape`, and metrics-server's
/// `pkg/scraper/client/resource/client.go` for `/metrics/resource`.
pub(crate) fn scrape(host: &str, path: &str) -> RawRequest {
    let request_line = format!("GET {path} HTTP/1.1");
    head(
        host,
        &[
            &request_line,
            "Host: HOST",
            "User-Agent: Prometheus/2.42.0",
            "Accept: application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "Accept-Encoding: gzip",
            "Authorization: Bearer eyJhbGciOiJSUzI1NiJ9.e30.c2lnbmF0dXJl",
            "X-Prometheus-Scrape-Timeout-Seconds: 10",
        ],
    )
}

/// Returns all heads with their names, for checks that apply to each.
pub(crate) fn all(host: &str) -> Vec<(&'static str, RawRequest)> {
    let since = "?limitBytes=1048576&sinceTime=2026-01-02T03%3A04%3A05Z&timestamps=true";
    let shell = "command=sh&command=-c&command=cat+%26%26+true&error=1&input=1&output=1";
    let terminal = "command=sh&input=1&output=1&tty=1";
    let streams = "error=1&input=1&output=1";
    let web_socket = command_over_websocket(host, "exec", &format!("command=sh&{streams}"));
    let summary = "/stats/summary?only_cpu_and_memory=true";
    let checkpoint = "/checkpoint/default/web-0/app";
    vec![
        ("logs", logs(host, "")),
        ("logs -f", logs(host, "?follow=true&tailLines=10")),
        ("logs --since-time", logs(host, since)),
        ("exec", command_over_spdy(host, "exec", shell)),
        ("exec -t", command_over_spdy(host, "exec", terminal)),
        ("attach", command_over_spdy(host, "attach", streams)),
        ("exec over WebSocket", web_socket),
        ("port-forward", port_forward(host)),
        ("metrics by proxy", node_proxy(host, "GET", "/metrics")),
        ("summary by proxy", node_proxy(host, "GET", summary)),
        ("pods by proxy", node_proxy(host, "GET", "/pods")),
        ("checkpoint", node_proxy(host, "POST", checkpoint)),
        ("scrape", scrape(host, "/metrics")),
        ("scrape of cadvisor", scrape(host, "/metrics/cadvisor")),
        ("scrape of resources", scrape(host, "/metrics/resource")),
    ]
}
