//! The command `ca rotate`: changes the stage of the rotation of the CA, and prints it.

use std::fmt::Write as _;

use tunnel_process::output::OutputFormat;
use tunnel_process::schema::Document;

use super::{VerbError, VerbOutput, json, running};
use tunnel_ca::rotation::{
    AgentCounts, RotationAction, RotationProgress, RotationStage, RotationStatus,
};
use tunnel_store::data_dir::{DataDir, rfc3339};

/// Runs `action` at the running server, and prints the stage.
pub(super) async fn rotate(
    dir: &DataDir,
    action: Option<RotationAction>,
    output: OutputFormat,
) -> Result<VerbOutput, VerbError> {
    let server = running(dir).await?;
    let status = match action {
        Some(action) => server.rotate_ca(action).await?,
        None => server.ca_rotation().await?,
    };
    Ok(VerbOutput::out(match output {
        OutputFormat::Table => describe(&status),
        OutputFormat::Json => json(&Document::new(&status))?,
    }))
}

fn describe(status: &RotationStatus) -> String {
    let mut text = describe_stage(status);
    let Some(agents) = &status.left_behind else {
        return text;
    };
    if agents.pending + agents.expired > 0 {
        let names = match pending_nodes(agents) {
            names if names.is_empty() => names,
            names => format!(" ({names})"),
        };
        let _infallible = writeln!(
            text,
            "left behind: {} agents with an older certificate{names}, {} without a valid one; agents with a ServiceAccount \
             token enroll again by themselves, within minutes, and the others need a new token",
            agents.pending, agents.expired
        );
    }
    if !status.not_counted.is_empty() {
        let _infallible = writeln!(
            text,
            "not counted: agents that only these servers know: {}",
            status.not_counted.join(", ")
        );
    }
    text
}

fn describe_stage(status: &RotationStatus) -> String {
    let Some(progress) = &status.in_progress else {
        return format!(
            "stage: none; the CA {} signs and is trusted alone\n",
            short(&status.signer)
        );
    };
    let (old, new) = (short(&progress.old), short(&progress.new));
    let agents = &progress.agents;
    let mut text = format!(
        "stage: {} since {}; the CA {} signs, and {old} (old) and {new} (new) are trusted\n\
         agents: {} renewed since then, {} pending, {} without a valid certificate, {} with a kubelet's\n",
        progress.stage.label(),
        rfc3339(progress.since),
        short(&status.signer),
        agents.renewed,
        agents.pending,
        agents.expired,
        agents.kubelets,
    );
    if status.other_servers > 0 {
        let counted = match status.not_counted.as_slice() {
            [] => "the agents of all are counted".to_owned(),
            silent => format!(
                "not counted, because they do not answer, or know more nodes than limits.directoryNodes of this one: {}",
                silent.join(", ")
            ),
        };
        let _infallible = writeln!(text, "servers: {}; {counted}", status.other_servers + 1);
    }
    if !agents.pending_nodes.is_empty() {
        let _infallible = writeln!(text, "pending: {}", pending_nodes(agents));
    }
    let _infallible = writeln!(text, "next: {}", advice(progress, &status.not_counted));
    text
}

/// Returns the names of pending agents, and whether there are more.
fn pending_nodes(agents: &AgentCounts) -> String {
    let more = if agents.pending > agents.pending_nodes.len() {
        ", ..."
    } else {
        ""
    };
    format!("{}{more}", agents.pending_nodes.join(", "))
}

/// Returns what the operator should do next.
fn advice(progress: &RotationProgress, not_counted: &[String]) -> String {
    let wait = if progress.agents.pending > 0 {
        "wait for the pending agents: those that are connected are asked to renew within minutes; then "
    } else if !not_counted.is_empty() {
        "connect, upgrade or stop the servers that are not counted, or raise the limit; then "
    } else {
        ""
    };
    let then = match progress.stage {
        RotationStage::Announced => {
            "give the new CA ('tunnel-server ca') to callers and agents that verify by a file, and run 'tunnel-server ca rotate \
             --next': the new CA signs, and unused join tokens end"
        }
        RotationStage::Issuing => {
            "run 'tunnel-server ca rotate --next': the old CA is not trusted from then on"
        }
        RotationStage::Returning => {
            "run 'tunnel-server ca rotate --next': the new CA is not trusted from then on"
        }
    };
    format!("{wait}{then}")
}

/// Returns the beginning of a hash, by which operators distinguish CAs.
fn short(hash: &str) -> &str {
    hash.get(..16).unwrap_or(hash)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::testing::assert_contains;

    #[test]
    fn status_names_the_stage_the_counts_and_the_next_command() {
        let mut status = RotationStatus {
            signer: "ab".repeat(32),
            in_progress: None,
            other_servers: 0,
            not_counted: Vec::new(),
            left_behind: None,
        };
        assert_contains(&describe(&status), "stage: none; the CA abababababababab");
        status.left_behind = Some(AgentCounts::default());
        assert!(!describe(&status).contains("left behind"));
        assert!(!describe(&status).contains("not counted"));
        status.not_counted = vec!["b".to_owned(), "c".to_owned()];
        let others = "not counted: agents that only these servers know: b, c";
        assert_contains(&describe(&status), others);
        status.not_counted.clear();
        status.left_behind = Some(AgentCounts {
            pending: 2,
            pending_nodes: vec!["worker-1".to_owned()],
            expired: 3,
            ..AgentCounts::default()
        });
        let counts = "2 agents with an older certificate (worker-1, ...), 3 without a valid one";
        assert_contains(&describe(&status), counts);
        status.left_behind = None;
        for stage in [
            RotationStage::Announced,
            RotationStage::Issuing,
            RotationStage::Returning,
        ] {
            for pending in [0, 11] {
                status.in_progress = Some(RotationProgress {
                    stage,
                    since: SystemTime::UNIX_EPOCH,
                    renewed_by: SystemTime::UNIX_EPOCH,
                    old: "ab".repeat(32),
                    new: "cd".repeat(32),
                    agents: AgentCounts {
                        renewed: 3,
                        pending,
                        pending_nodes: vec!["worker-1".to_owned(); pending.min(10)],
                        ..AgentCounts::default()
                    },
                });
                let text = describe(&status);
                assert_contains(&text, &format!("stage: {} since 1970", stage.label()));
                assert_contains(&text, &format!("3 renewed since then, {pending} pending"));
                assert_contains(&text, "ca rotate --next'");
                assert_eq!(text.contains("wait for"), pending > 0);
                assert_eq!(text.contains("worker-1, ..."), pending > 0);
                assert!(!text.contains("servers:"));
                status.other_servers = 2;
                assert_contains(&describe(&status), "servers: 3; the agents of all are");
                status.not_counted = vec!["b".to_owned()];
                let text = describe(&status);
                assert_contains(&text, "servers: 3; not counted, because");
                assert_contains(&text, "limits.directoryNodes of this one: b");
                assert_eq!(text.contains("next: connect, "), pending == 0);
                status.other_servers = 0;
                status.not_counted.clear();
            }
        }
    }
}
