//! F35: one of the two processes is suspended for 20 s, like a hanging machine.

use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, sleep_until};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{Clocks, Run, Runs, Stack, TransportMode, until};
use tunnel_tests::process::Signal;

#[tokio::test(flavor = "multi_thread")]
async fn f35_process_that_stands_still_is_suspect_and_goes_on_without_a_double_delivery()
-> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        for (case, who) in [
            ("agent stopped", Who::Agent),
            ("server stopped", Who::Server),
        ] {
            runs.start(transport_mode, case, |run| stopped(run, who));
        }
    }
    runs.finish().await
}

/// The process that is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Agent,
    Server,
}

/// Sends SIGSTOP during a stream, and SIGCONT.
async fn stopped(run: Run, who: Who) -> Result<()> {
    let clocks = run.clocks;
    let mut stack = Stack::up(run).await?;
    let pipe = stack.node_clients[0].talk().await?;
    let began = Instant::now();
    signal(&mut stack, who, Signal::Stop)?;
    let continues = began + clocks.time(STOPPED);
    let suspected = until(began, continues - began, async || match who {
        Who::Agent => stack.state().await.is_ok_and(|state| state == "suspect"),
        Who::Server => {
            let count = stack.agent_metric("tunnel_agent_sessions_suspect").await;
            count.is_ok_and(|count| count > 0)
        }
    });
    let suspected = suspected.await;
    let bound = clocks.bound(Duration::from_secs(5));
    run.within("the other end suspects it", bound, suspected)?;
    if who == Who::Agent {
        let every = clocks.time(ASK_EVERY);
        let requester = &stack.node_clients[0].requester;
        requester.ensure_refused(run, continues, every).await?;
    }
    sleep_until(continues).await;
    signal(&mut stack, who, Signal::Cont)?;
    let continued = Instant::now();
    pipe.mark();
    let requester = &stack.node_clients[0].requester;
    let serving = requester.serving_on(continued, scaled(GIVE_UP));
    let (served, resumed) = tokio::join!(serving, pipe.resumed(scaled(GIVE_UP)));
    let bound = clocks.connect_bound(Duration::from_secs(3));
    let what = "new requests served for good after it goes on";
    run.within(what, bound, served)?;
    let bound = clocks.bound(Duration::from_secs(35));
    run.within("streams go on after it does", bound, resumed)?;
    // Additional or different bytes would mean that data was delivered twice.
    let ends = pipe.finish(scaled(FINISH)).await;
    run.equal("stream's bytes equal, none twice", &ends)?;
    let node_client = &stack.node_clients[0];
    node_client.requester.served().await?;
    node_client.ensure_equal(run)
}

fn signal(stack: &mut Stack, who: Who, signal: Signal) -> Result<()> {
    match who {
        Who::Agent => stack.agent.signal(signal),
        Who::Server => stack.replicas.servers[0].process().signal(signal),
    }
}

const STOPPED: Duration = Duration::from_secs(20);
const ASK_EVERY: Duration = Duration::from_secs(2);
/// Far beyond any bound of the measured values.
const GIVE_UP: Duration = Duration::from_secs(45);
/// Time limit for the rest of a stream, which may still wait for a retransmission.
const FINISH: Duration = Duration::from_secs(40);
