//! Checks of the listeners for targets of the cloud, and of what leads pods to them. Without
//! `--cloud-listen` there is nothing to check.

use std::net::SocketAddr;

use tunnel_doctor::{Fault, Severity, conditions};

use super::names::DNS_TARGET;
use crate::doctor::cloud::{ListenerAnswer, ListenerFacts, RuleTable};
use crate::doctor::facts::{AgentAnswer, Facts};
use crate::ingress::listeners::CONDITION;
use crate::render::nft_table::TABLE;

/// D16.listen: the program on each address.
pub(super) fn listen(facts: &Facts) -> Result<Vec<Fault>, String> {
    let agent = &facts.agent.answer;
    let lines: Vec<&str> = match agent {
        AgentAnswer::Running(agent) => conditions(&agent.readiness)
            .filter(|condition| condition.component == CONDITION)
            .map(|condition| condition.text)
            .collect(),
        AgentAnswer::NotRunning | AgentAnswer::OtherProgram(_) | AgentAnswer::NoAnswer(_) => {
            Vec::new()
        }
    };
    let fault = |place: String, what: String, fix: &str| Fault {
        severity: Severity::Error,
        place,
        what,
        fix: fix.to_owned(),
    };
    let reported = lines.iter().map(|line| {
        let fix = "ss -ltnp; stop the other program, or set another address in --cloud-listen";
        fault("--cloud-listen".to_owned(), (*line).to_owned(), fix)
    });
    let found = facts.cloud.listeners.iter().filter_map(|listener| {
        let address = listener.listener.address.to_string();
        if lines
            .iter()
            .any(|line| line.split(' ').any(|word| word == address))
        {
            return None;
        }
        match (&listener.answer, agent) {
            // Reported as D20.
            (ListenerAnswer::Failed(_), AgentAnswer::NotRunning) => None,
            (ListenerAnswer::Failed(reason), _) => {
                let what = format!("no program listens on the address: {reason}");
                let fix = "systemctl restart tunnel-agent, with these settings";
                Some(fault(address, what, fix))
            }
            (_, AgentAnswer::NotRunning) => {
                let what = "another program listens on the address, and no agent runs".to_owned();
                let fix = "ss -ltnp; stop the program, or set another address in --cloud-listen; \
                           Yurthub uses 10261, 10267 and 10268";
                Some(fault(address, what, fix))
            }
            (_, _) => None,
        }
    });
    Ok(reported.chain(found).collect())
}

/// D16.address: the link-local addresses on interfaces.
pub(super) fn address(facts: &Facts) -> Result<Vec<Fault>, String> {
    let missing = facts.cloud.listeners.iter();
    let missing = missing.filter(|listener| listener.is_on_interface == Some(false));
    let faults = missing.map(|listener| {
        let ip = listener.listener.address.ip();
        let (clients, unit) = match listener.listener.target.as_str() {
            DNS_TARGET => ("the cache of this node does", "culvert-node-dns"),
            _ => ("pods do", "culvert-edge-apiserver"),
        };
        Fault {
            severity: Severity::Error,
            place: ip.to_string(),
            what: format!(
                "no interface of this host has the address, so that {clients} not reach it"
            ),
            fix: format!("systemctl enable --now {unit}; by hand: tunnel-agent address add {ip}"),
        }
    });
    Ok(faults.collect())
}

/// D16.nft: the table for pods.
pub(super) fn nft(facts: &Facts) -> Result<Vec<Fault>, String> {
    let rules = &facts.cloud.rules;
    let mistakes = match &rules.table {
        Ok(Some(table)) => table_mistakes(table, &facts.cloud.listeners),
        Ok(None) if rules.is_expected => vec!["the table is missing".to_owned()],
        Ok(None) => Vec::new(),
        Err(reason) if rules.is_expected => return Err(reason.clone()),
        Err(_not_used) => Vec::new(),
    };
    let faults = mistakes.into_iter().map(|what| Fault {
        severity: Severity::Error,
        place: format!("nft table {TABLE}"),
        what,
        fix:
            "render the file again: tunnel-agent render edge-apiserver --way nft --service-ip IP; \
              systemctl restart culvert-edge-apiserver"
                .to_owned(),
    });
    Ok(faults.collect())
}

fn table_mistakes(table: &RuleTable, listeners: &[ListenerFacts]) -> Vec<String> {
    let mut mistakes = Vec::new();
    for hook in HOOKS {
        let Some(chain) = table.chains.iter().find(|chain| chain.hook == hook) else {
            mistakes.push(format!("no chain is called in {hook}"));
            continue;
        };
        if chain.priority >= KUBE_PROXY {
            mistakes.push(format!(
                "priority {} in {hook} is not before that of kube-proxy ({KUBE_PROXY})",
                chain.priority
            ));
        }
        let is_listener = |target: SocketAddr| {
            let mut listeners = listeners.iter();
            listeners.any(|listener| listener.listener.address == target)
        };
        if let Some(other) = chain.targets.iter().find(|target| !is_listener(**target)) {
            mistakes.push(format!(
                "{hook} redirects to {other}, which is not in --cloud-listen"
            ));
        } else if chain.targets.is_empty() {
            mistakes.push(format!("{hook} redirects nothing"));
        }
    }
    mistakes
}

/// D16.datapath: eBPF before the table.
pub(super) fn data_path(facts: &Facts) -> Result<Vec<Fault>, String> {
    let rules = &facts.cloud.rules;
    let is_in_use = rules.is_expected || matches!(rules.table, Ok(Some(_)));
    let fault =
        facts
            .cloud
            .data_path
            .filter(|_| is_in_use)
            .map(|name| {
                Fault {
        severity: Severity::Warning,
        place: format!("nft table {TABLE}"),
        what: format!(
            "{name} runs on this node; where it replaces kube-proxy, it translates the Service's \
             address before the table sees a connection"
        ),
        fix: "check it: cilium-dbg status | grep KubeProxyReplacement; set the two variables \
              instead: tunnel-agent render edge-apiserver --way env"
            .to_owned(),
    }
            });
    Ok(fault.into_iter().collect())
}

/// D16.san: the addresses for pods in the certificate of the API server.
pub(super) fn san(facts: &Facts) -> Result<Vec<Fault>, String> {
    let rules = &facts.cloud.rules;
    let severity = match &rules.table {
        // Pods dial the address of the Service. A table that is missing is D16.nft.
        Ok(Some(_)) => return Ok(Vec::new()),
        Ok(None) if rules.is_expected => return Ok(Vec::new()),
        Ok(None) => Severity::Warning,
        Err(_unknown) => Severity::Info,
    };
    let (mut faults, mut unknown) = (Vec::new(), Vec::new());
    let listeners = facts.cloud.listeners.iter();
    for facts in listeners.filter(|facts| !facts.listener.address.ip().is_loopback()) {
        let address = facts.listener.address;
        match &facts.answer {
            ListenerAnswer::Certificate { has_address: false } => faults.push(Fault {
                severity,
                place: address.to_string(),
                what: format!(
                    "the API server's certificate has no SAN {}, so that pods refuse it by that \
                     address",
                    address.ip()
                ),
                fix: "add the address to apiServer.certSANs of kubeadm, or use the nft table: \
                      tunnel-agent render edge-apiserver --way nft --service-ip IP"
                    .to_owned(),
            }),
            ListenerAnswer::NoCertificate(reason) => {
                unknown.push(format!(
                    "{address}: no certificate of the API server: {reason}"
                ));
            }
            // Failures are reported as D16.listen.
            ListenerAnswer::Certificate { has_address: true }
            | ListenerAnswer::Connected
            | ListenerAnswer::Failed(_) => {}
        }
    }
    if faults.is_empty() && !unknown.is_empty() {
        return Err(unknown.join("; "));
    }
    Ok(faults)
}

/// Hooks that see connections of pods, and those of the host.
const HOOKS: [&str; 2] = ["prerouting", "output"];
/// Priority of the rules of kube-proxy.
const KUBE_PROXY: i64 = -100;
