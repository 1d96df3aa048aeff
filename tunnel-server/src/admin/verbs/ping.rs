//! The command `ping NODE [PORT]`: whether the agent of a node answers, and whether a port of the node
//! does.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};
use tunnel_process::output::OutputFormat;
use tunnel_process::schema::Document;
use tunnel_proto::wire::name::{NodeName, Port};

use super::args::DataDirArg;
use super::connect::{ConnectError, open_tunnel};
use super::table::clean;
use super::{VerbError, running};
use crate::admin::AdminError;
use crate::admin::ping::PingReport;
use tunnel_store::data_dir::DataDir;

/// Ask the agent of a node whether it answers, and connect to a port of the node.
#[derive(Debug, Clone, clap::Args)]
pub struct PingArgs {
    /// Name of the node
    pub node: NodeName,
    /// Port of the node to connect to; the server and the agent must allow it
    pub port: Option<Port>,
    /// Number of times
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: u32,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub output: OutputFormat,
    /// Data directory of the server.
    #[command(flatten)]
    pub data_dir: DataDirArg,
}

/// One answer, or its failure.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Pinged {
    #[serde(flatten)]
    report: PingReport,
    /// The connection to the port, if one was asked for.
    target: Option<PingedTarget>,
}

/// The connection to a port of the node.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct PingedTarget {
    port: u16,
    /// The other server that forwarded the stream, if one did.
    hop: Option<String>,
    /// Time until the target had accepted, in milliseconds.
    connected_millis: Option<f64>,
    /// Time without the round trip to the agent, in milliseconds: the agent's dial. `None` if another
    /// server forwarded the stream.
    dial_millis: Option<f64>,
    /// Why the target was not reached.
    error: Option<String>,
}

impl Pinged {
    /// Returns whether the agent and the port have answered.
    fn is_good(&self) -> bool {
        match &self.target {
            Some(target) => target.error.is_none(),
            None => {
                let mut sessions = self.report.sessions.iter();
                sessions.any(|session| session.answered_millis.is_some()) || self.is_elsewhere()
            }
        }
    }

    /// Returns whether only another server has a session of the node.
    fn is_elsewhere(&self) -> bool {
        let replica = self.report.replica.as_deref();
        self.report.sessions.is_empty() && replica.is_some_and(|name| name != self.report.own)
    }

    fn lines(&self) -> String {
        let report = &self.report;
        let node = clean(&report.node);
        let mut text = String::new();
        for session in &report.sessions {
            let (transport, address) = (clean(&session.transport), clean(&session.address));
            let answer = match session.answered_millis {
                Some(millis) => format!("answered in {millis:.1} ms"),
                None => "did not answer in 5 s".to_owned(),
            };
            text.push_str(&format!(
                "{node}: {answer} over {transport} from {address}, round trip {:.1} ms, {} (session {} of this server)\n",
                session.rtt_millis,
                clean(&session.state),
                session.session
            ));
        }
        if report.sessions.is_empty() {
            text.push_str(&match &report.replica {
                Some(server) => format!(
                    "{node}: the agent is connected to server {}, one hop from this server; ping with a port goes there\n",
                    clean(server)
                ),
                None => format!(
                    "{node}: no agent is connected; tunnel-server nodes {node} -o wide; tunnel-server nodes --failed {node}\n"
                ),
            });
        }
        if let Some(target) = &self.target {
            let path = match &target.hop {
                Some(server) => format!("through server {}", clean(server)),
                None => "through a session of this server".to_owned(),
            };
            text.push_str(&match (&target.error, target.connected_millis) {
                (Some(error), _) => format!("{node}:{}: {}\n", target.port, clean(error)),
                (None, millis) => {
                    let dial = target.dial_millis;
                    let dial = dial.map_or_else(String::new, |dial| {
                        format!(", of which the agent's dial took {dial:.1} ms")
                    });
                    format!(
                        "{node}:{}: connected in {:.1} ms {path}{dial}\n",
                        target.port,
                        millis.unwrap_or_default()
                    )
                }
            });
        }
        text
    }
}

impl PingArgs {
    /// Runs the command and prints each answer.
    ///
    /// # Errors
    /// Returns a [`VerbError`]; [`VerbError::NoAnswer`] if the last answer was a failure.
    pub async fn run(self) -> Result<(), VerbError> {
        let dir = DataDir::open_existing(&self.data_dir.path()?)?;
        let mut is_good = true;
        for number in 0..self.count {
            if number > 0 {
                sleep(INTERVAL).await;
            }
            let pinged = self.ping(&dir).await?;
            is_good = pinged.is_good();
            let text = match self.output {
                OutputFormat::Table => pinged.lines(),
                OutputFormat::Json => {
                    format!("{}\n", serde_json::to_string(&Document::new(&pinged))?)
                }
            };
            let mut output = io::stdout();
            output.write_all(text.as_bytes())?;
            output.flush()?;
        }
        if is_good {
            Ok(())
        } else {
            Err(VerbError::NoAnswer(self.node))
        }
    }

    async fn ping(&self, dir: &DataDir) -> Result<Pinged, VerbError> {
        let report = match running(dir).await?.ping(&self.node).await {
            Err(error) if error.is_not_found() => {
                return Err(VerbError::UnknownNodes([&self.node].into_iter().collect()));
            }
            answer => answer?,
        };
        let target = match self.port {
            Some(port) => Some(self.connect(dir, port, &report).await?),
            None => None,
        };
        Ok(Pinged { report, target })
    }

    /// Connects to a port as `connect` does, and closes the connection.
    async fn connect(
        &self,
        dir: &DataDir,
        port: Port,
        report: &PingReport,
    ) -> Result<PingedTarget, VerbError> {
        let path = dir.admin_socket();
        let socket = UnixStream::connect(&path).await;
        let socket = socket.map_err(|error| AdminError::Unreachable(path, error))?;
        let began = Instant::now();
        let opened = open_tunnel(socket, &self.node, port).await;
        let elapsed = millis(began.elapsed());
        let mut target = PingedTarget {
            port: port.get(),
            hop: None,
            connected_millis: None,
            dial_millis: None,
            error: None,
        };
        match opened {
            Ok(opened) => {
                let rtt = report.sessions.first().map(|session| session.rtt_millis);
                target.dial_millis = rtt
                    .filter(|_| opened.via.is_none())
                    .map(|rtt| (elapsed - rtt).max(0.0));
                target.hop = opened.via;
                target.connected_millis = Some(elapsed);
            }
            Err(
                error @ (ConnectError::Refused { .. }
                | ConnectError::Timeout
                | ConnectError::InvalidResponse(_)),
            ) => target.error = Some(error.to_string()),
            Err(error) => return Err(error.into()),
        }
        Ok(target)
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// Time between two pings.
const INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::ping::PingedSession;

    fn pinged(sessions: Vec<PingedSession>, replica: Option<&str>) -> Pinged {
        Pinged {
            report: PingReport {
                node: "worker-1".to_owned(),
                own: "server-1".to_owned(),
                replica: replica.map(str::to_owned),
                sessions,
            },
            target: None,
        }
    }

    #[test]
    fn answer_has_way_transport_and_times_and_a_failure_says_what_to_do() {
        let session = PingedSession {
            session: 7,
            transport: "quic".to_owned(),
            address: "192.0.2.1:5".to_owned(),
            state: "live".to_owned(),
            rtt_millis: 11.84,
            answered_millis: Some(12.3),
            ..PingedSession::default()
        };
        let silent = PingedSession {
            answered_millis: None,
            ..session.clone()
        };
        let mut good = pinged(vec![session], None);
        assert!(good.is_good());
        let expected = "worker-1: answered in 12.3 ms over quic from 192.0.2.1:5, round trip 11.8 ms, live (session 7 of this server)\n";
        assert_eq!(good.lines(), expected);
        let mut target = PingedTarget {
            port: 9100,
            hop: None,
            connected_millis: Some(15.0),
            dial_millis: Some(3.2),
            error: None,
        };
        good.target = Some(target.clone());
        let connected = "worker-1:9100: connected in 15.0 ms through a session of this server, of which the agent's dial took 3.2 ms\n";
        assert_eq!(good.lines(), format!("{expected}{connected}"));
        target.error = Some("target_refused\u{202e}".to_owned());
        good.target = Some(target);
        assert!(!good.is_good() && good.lines().contains("worker-1:9100: target_refused?"));
        assert!(!pinged(vec![silent], None).is_good());
        let away = pinged(Vec::new(), None);
        assert!(!away.is_good() && away.lines().contains("nodes --failed worker-1"));
        let elsewhere = pinged(Vec::new(), Some("server-2"));
        assert!(elsewhere.is_good() && elsewhere.lines().contains("server-2, one hop"));
    }
}
