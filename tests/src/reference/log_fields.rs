//! The page of log fields. `tests/scenarios/house/log_fields.rs` compares the table with the
//! sources.

use super::put;

/// The fields of log lines and of their spans, in alphabetical order, each with its meaning.
pub const LOG_FIELDS: &[(&str, &str)] = &[
    ("access_lines", "access log lines among the lost lines"),
    ("account", "ServiceAccount of the agent's token"),
    ("address", "address of a listener"),
    ("addresses", "number of addresses of a certificate"),
    (
        "agents_over_tcp",
        "agents that the limit of open files allows over TCP",
    ),
    (
        "backtrace",
        "backtrace of a panic, if RUST_BACKTRACE is set",
    ),
    ("buffer_pool_bytes", "size of the buffer pool"),
    ("by", "end that closed the session"),
    (
        "bytes_in",
        "payload bytes that this process received in the tunnel",
    ),
    (
        "bytes_out",
        "payload bytes that this process sent into the tunnel",
    ),
    ("ca", "certificates of the CA, without keys"),
    (
        "caller",
        "identity of the caller: name of its certificate, its password, or its user; at an agent and behind a hop as the \
         server says",
    ),
    (
        "callers",
        "connections of callers that the limit of open files allows",
    ),
    ("client", "address of a DNS client"),
    ("clock", "time of this host"),
    (
        "code",
        "result of a request, or reason of a close or refusal, see codes.md",
    ),
    ("commit", "commit of the build"),
    ("condition", "condition of /readyz?verbose"),
    ("config_map", "ConfigMap that is written"),
    ("count", "number of what the line reports"),
    ("deadline", "time until open streams are reset, in seconds"),
    ("delay", "time until the drain begins, in seconds"),
    ("detail", "cause of a refusal, for the operator"),
    (
        "dialed",
        "address of the target that the agent connected to",
    ),
    (
        "difference",
        "what the rules in force and those of a dry run decide",
    ),
    ("dir", "data directory"),
    (
        "direction",
        "edge for a connection from the edge to a target of the cloud",
    ),
    ("doubts", "whether the server doubts that the session works"),
    (
        "dry_run",
        "what the rules of dryRun decide, if they decide otherwise",
    ),
    ("elapsed", "duration, in seconds"),
    ("end", "how the drain ended"),
    ("ended", "end of a certificate that is no longer valid"),
    ("ends", "end of a certificate"),
    ("epoch", "random number of the other server's process"),
    ("error", "error with its causes"),
    ("events", "number of lost audit events"),
    ("failures", "number of failures before the success"),
    ("file", "file of the configuration"),
    ("holder", "server that has the Lease"),
    ("ignored", "number of ignored orders about nodes"),
    ("key", "key of a Secret, or of the configuration file"),
    ("keys", "keys of the configuration file"),
    ("kind", "kind of suppressed lines"),
    ("lease", "name of a Lease"),
    ("limit", "limit that was reached"),
    ("lines", "number of lost log lines"),
    (
        "listener",
        "listener: agents, http, https, connect, service, meta, dns, peers, cloud",
    ),
    ("location", "source line of a panic"),
    ("members", "number of servers that the server reported"),
    ("memory_limit_bytes", "memory limit of the process"),
    (
        "move_within",
        "time within which the agent leaves the server, in seconds",
    ),
    (
        "name",
        "name of what the line reports: a variable, a target of the cloud",
    ),
    ("names", "number of names of a certificate"),
    ("namespace", "namespace of the cluster"),
    ("node", "name of the node"),
    (
        "node_ip",
        "address of the node, where the agent dials its ports",
    ),
    ("not_after", "end of a certificate"),
    ("not_before", "begin of a certificate"),
    ("object", "kind of a Kubernetes object"),
    ("open_files", "limit of open files"),
    (
        "own",
        "whether this end observed the silence, and not the other end alone",
    ),
    ("path", "file or directory"),
    (
        "peer",
        "other end of a connection: a caller, an agent or a server",
    ),
    (
        "persisted_nodes",
        "number of nodes read from the data directory",
    ),
    ("pod", "namespace and name of a Pod"),
    ("port", "port of the node"),
    (
        "previous",
        "whether the certificate is the agent's previous one",
    ),
    ("proxy", "HTTP proxy, without user and password"),
    ("query", "name and type of a DNS query"),
    ("ready_for", "lifetime of the session, in seconds"),
    ("reason", "reason of a close, for people"),
    (
        "receive_bytes",
        "size of the receive buffer of a UDP socket",
    ),
    ("records", "number of DNS records"),
    ("remote", "address of another server"),
    ("replica", "name of a server"),
    ("replicas", "number of servers of the installation"),
    (
        "request",
        "subject of a request; name of a CertificateSigningRequest",
    ),
    ("resolver", "address of a DNS resolver"),
    ("resolvers", "addresses of the DNS resolvers"),
    ("resource", "resource of the Kubernetes API"),
    (
        "retried",
        "whether the request was sent once more because its session was lost",
    ),
    ("retry_in", "time until the next attempt, in seconds"),
    ("secret", "name of a Secret"),
    ("send_bytes", "size of the send buffer of a UDP socket"),
    ("server", "name of the server that enrolled the agent"),
    ("servers", "number of servers of the cluster"),
    ("service", "name of a TCP service or a Service"),
    ("session", "number of the session at the server"),
    ("sessions", "largest number of sessions"),
    ("side", "end that left bytes unread"),
    ("signal", "signal that the process received"),
    ("signer", "signer of a CertificateSigningRequest"),
    ("silence", "time without a sign of life, in seconds"),
    ("software", "name and version of the agent's software"),
    (
        "source",
        "source of suppressed lines: address (of IPv6 the /64), node or session",
    ),
    ("stage", "stage of the rotation of the CA"),
    ("state", "state of a session"),
    ("status", "HTTP status of the response"),
    ("streams", "number of open streams"),
    (
        "suppressed",
        "number of lines like this one that were not written",
    ),
    (
        "target",
        "target of a stream as requested, of the cloud its name",
    ),
    ("token", "public id of a join token, never the token"),
    (
        "total",
        "number of orders accepted from that server since the start",
    ),
    ("trace_parent", "trace context of the request"),
    ("transport", "transport of a session: quic or h2"),
    ("variable", "environment variable"),
    ("version", "version of the software"),
    ("via", "server that passed the request on to its agent"),
    (
        "wanted_bytes",
        "size of a socket buffer that the process requests",
    ),
    ("what", "files or task that the line reports"),
    ("zone", "zone of the embedded DNS"),
];

pub(super) fn page() -> String {
    let mut page = HEAD.to_owned();
    for (name, meaning) in LOG_FIELDS {
        put(&mut page, format_args!("| `{name}` | {meaning} |\n"));
    }
    page
}

const HEAD: &str = "\
# Log fields

Generated from the code by `make docs`; do not edit. [Monitoring](monitoring.md#logs) explains the log. Each line has `timestamp`,
`level` and `message` in addition, and `span` with the fields of the connection or the session, if it has one.

| field | |
|---|---|
";
