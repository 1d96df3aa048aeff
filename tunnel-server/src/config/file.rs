//! What a change of the configuration file applies to while the server runs, and which settings the
//! servers of an installation share.

/// Returns whether the setting of a key applies while the server runs, when the file changes.
pub fn is_live(key: &str) -> bool {
    LIVE_KEYS.contains(&key)
}

/// Returns whether all servers of an installation have the same setting of a key. Others are
/// addresses, names and files of one host, and what it logs.
pub fn is_shared(key: &str) -> bool {
    let is_of_host = HOST_KEYS.contains(&key)
        || ["Listen", "File", "Ca"]
            .iter()
            .any(|end| key.ends_with(end))
        || ["log", "accessLog", "auditLog", "connectUds"]
            .iter()
            .any(|begin| key.starts_with(begin));
    !is_of_host
}

/// Keys of the file that apply while the server runs. `allowUnauthenticated` is part of the check of
/// the others alone.
pub const LIVE_KEYS: &[&str] = &[
    "accessLog",
    "accessLogSample",
    "allowUnauthenticated",
    "callers",
    "cloud",
    "cloudApiserver",
    "compat",
    "connectPorts",
    "delegationAllowedCallers",
    "dryRun",
    "httpProxyPorts",
    "httpsProxyPorts",
    "limits",
    "localhostProxyPorts",
    "logLevel",
    "ports",
    "rules",
    "services",
];

/// Keys of settings that differ between the hosts of an installation.
const HOST_KEYS: &[&str] = &[
    "advertise",
    "connectAuth",
    "dataDir",
    "httpsName",
    "kubeconfig",
    "peers",
    "replicaName",
    "statusAuth",
    "zone",
];
