//! F05 to F09: nothing passes, for a second, for half a minute, for ten minutes, in one direction only,
//! or until the end.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::{join_all, try_join_all};
use tokio::time::{Instant, sleep, sleep_until};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{
    Clocks, Layout, ProcessUsage, Run, Runs, Site, Stack, TransportMode, until,
};
use tunnel_tests::link::{Impairment, TrafficClass};

#[tokio::test(flavor = "multi_thread")]
async fn f05_partition_of_a_second_is_only_a_pause() -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        runs.start(transport_mode, "partition of 1 s", brief);
    }
    runs.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn f06_partition_of_half_a_minute_is_reported_to_new_requests_and_outlived_by_streams()
-> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        runs.start(transport_mode, "stream open", |run| long(run, true));
        runs.start(transport_mode, "idle", |run| long(run, false));
    }
    runs.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn f07_partition_of_ten_minutes_costs_nothing_and_ends_with_the_heal() -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        runs.start(transport_mode, "one server", |run| {
            endless(run, Layout::SINGLE)
        });
        runs.start(transport_mode, "three servers", |run| {
            endless(run, Layout::three(2))
        });
    }
    runs.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn f08_partition_one_way_is_noticed_at_both_ends() -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    let (up, down) = (TrafficClass::ALL.up(), TrafficClass::ALL.down());
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        runs.start(transport_mode, "to the server", |run| {
            silence(run, up, false)
        });
        runs.start(transport_mode, "to the agent", |run| {
            silence(run, down, false)
        });
    }
    runs.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn f09_half_open_tcp_is_noticed_at_both_ends() -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    for (case, busy) in [("stream open", true), ("idle", false)] {
        runs.start(TransportMode::H2, case, |run| {
            silence(run, TrafficClass::TCP, busy)
        });
    }
    runs.finish().await
}

/// Loses everything for a second during a stream.
async fn brief(run: Run) -> Result<()> {
    let site = Site::up(run).await?;
    let pipe = site.node_client.talk().await?;
    let before = site.ids();
    pipe.forget_stalls();
    site.link.set(TrafficClass::ALL, Impairment::black_hole());
    sleep(run.clocks.time(BRIEF)).await;
    site.link.heal();
    pipe.mark();
    let _resumed = pipe.resumed(scaled(GIVE_UP)).await;
    // A second session would be dialed within that time, if at all.
    sleep(run.clocks.time(BRIEF)).await;
    let bound = run.clocks.bound(Duration::from_millis(1500));
    run.within("stall of a stream", bound, Ok(pipe.stall()))?;
    let after = site.ids();
    ensure!(before == after, "sessions {before:?}, then {after:?}");
    run.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await)?;
    site.node_client.requester.served().await?;
    site.node_client.ensure_equal(run)
}

/// Loses everything for 30 s, with or without an open stream.
async fn long(run: Run, busy: bool) -> Result<()> {
    let clocks = run.clocks;
    let site = Site::up(run).await?;
    let pipe = site.node_client.talk_if(busy).await?;
    let began = Instant::now();
    site.link.set(TrafficClass::ALL, Impairment::black_hole());
    let heals = began + clocks.time(LONG);
    let suspect_after = if busy { SUSPECT_BUSY } else { SUSPECT_IDLE };
    let suspected = site.server_suspects(began, heals - began).await;
    let bound = clocks.bound(suspect_after);
    run.within("server suspects the agent", bound, suspected)?;
    let (requester, every) = (&site.node_client.requester, clocks.time(ASK_EVERY));
    requester.ensure_refused(run, heals, every).await?;
    sleep_until(heals).await;
    site.link.heal();
    let healed = Instant::now();
    let streams = async {
        let pipe = pipe.as_ref()?;
        pipe.mark();
        Some(pipe.resumed(scaled(GIVE_UP)).await)
    };
    let serving = requester.serving_on(healed, scaled(GIVE_UP));
    let (served, resumed) = tokio::join!(serving, streams);
    let bound = clocks.connect_bound(Duration::from_secs(3));
    run.within("new requests served for good after the heal", bound, served)?;
    if let (Some(resumed), Some(pipe)) = (resumed, pipe) {
        let bound = clocks.bound(Duration::from_secs(35));
        run.within("streams go on after the heal", bound, resumed)?;
        run.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await)?;
    }
    site.node_client.ensure_equal(run)
}

/// Loses everything between the agent and all servers for 10 min, during a stream at each server.
/// Before that, one of several servers is lost, and the others go on.
async fn endless(run: Run, layout: Layout) -> Result<()> {
    let clocks = run.clocks;
    let mut stack = Stack::up_with(run, layout).await?;
    let mut pipes = Vec::new();
    for node_client in &stack.node_clients {
        pipes.push(node_client.talk().await?);
    }
    if layout.sessions > 1 {
        one_link_lost(run, &stack).await?;
    }
    let began = Instant::now();
    let heals = began + clocks.pick(ENDLESS, ENDLESS_SHORT);
    let replicas = &stack.replicas;
    replicas.set(TrafficClass::ALL, &Impairment::black_hole());
    let lost = until(began, heals - began, async || {
        let holders = stack.replicas.holders().await;
        holders.is_ok_and(|holders| holders.is_empty())
    });
    let bound = clocks.bound(DEAD + SUSPECT_BUSY);
    run.within("servers close the dead sessions", bound, lost.await)?;
    for pipe in pipes {
        let ends = pipe.finish(scaled(FINISH)).await;
        run.equal_or_reset("stream's bytes equal, or the cut reported", &ends)?;
    }
    let before = Processes::of(&mut stack).await?;
    let every = clocks.time(ASK_SELDOM);
    let refusing = stack.node_clients.iter().map(|client| {
        let requester = &client.requester;
        requester.ensure_refused(run, heals, every)
    });
    try_join_all(refusing).await?;
    sleep_until(heals).await;
    Processes::of(&mut stack).await?.ensure_flat(run, &before)?;
    for link in &stack.replicas.links {
        link.heal();
    }
    let healed = Instant::now();
    let serving = stack.node_clients.iter().map(|client| {
        let requester = &client.requester;
        requester.serving_on(healed, scaled(GIVE_UP))
    });
    for served in join_all(serving).await {
        let bound = clocks.connect_bound(Duration::from_secs(30));
        run.within("new requests served for good after the heal", bound, served)?;
    }
    for node_client in &stack.node_clients {
        node_client.ensure_equal(run)?;
    }
    Ok(())
}

/// Loses everything between the agent and one of its servers, and heals that link.
async fn one_link_lost(run: Run, stack: &Stack) -> Result<()> {
    let holders = stack.replicas.holders().await?;
    let lost = *holders.first().context("no session")?;
    let link = stack.replicas.link(lost)?;
    link.set(TrafficClass::ALL, Impairment::black_hole());
    let began = Instant::now();
    let serving = stack.node_clients.iter().map(|client| {
        let requester = &client.requester;
        requester.serving_on(began, scaled(GIVE_UP))
    });
    for served in join_all(serving).await {
        // Streams are open, so the session is suspect soon.
        let bound = run.clocks.connect_bound(SUSPECT_BUSY);
        run.within("served over the other server", bound, served)?;
    }
    link.heal();
    Ok(())
}

/// The usage of all processes, and the number of lines in their logs.
struct Processes {
    taken: Instant,
    usages: Vec<(ProcessUsage, u64)>,
}

impl Processes {
    async fn of(stack: &mut Stack) -> Result<Self> {
        let mut ids = vec![(stack.agent.id(), stack.agent.log().clone())];
        for server in &mut stack.replicas.servers {
            let log = server.log().clone();
            ids.push((server.process().id(), log));
        }
        let mut usages = Vec::new();
        for (id, log) in ids {
            let usage = ProcessUsage::sample_min(id.context("a process has ended")?).await?;
            let lines = log.lines();
            let lines = lines.iter();
            let lines = lines.filter(|line| !line.contains(r#""message":"access""#));
            usages.push((usage, lines.count() as u64));
        }
        Ok(Self {
            taken: Instant::now(),
            usages,
        })
    }

    /// Checks that nothing has grown, and that no process has logged more than once in 30 s for each
    /// of the others.
    fn ensure_flat(&self, run: Run, before: &Self) -> Result<()> {
        let passed = (self.taken - before.taken).as_secs();
        let most_lines = (passed / 30 + 1) * self.usages.len() as u64;
        let servers = self.usages.len() as u64 - 1;
        for ((now, lines), (then, lines_then)) in self.usages.iter().zip(&before.usages) {
            let logged = lines - lines_then;
            let figure = format!(
                "{} then {} descriptors, {} then {} threads, {} then {} KiB, {logged} lines",
                then.descriptors,
                now.descriptors,
                then.threads,
                now.threads,
                then.memory_kib,
                now.memory_kib
            );
            run.report(&figure);
            let is_flat = now.descriptors <= then.descriptors + DIALING
                && now.threads <= then.threads
                && now.memory_kib
                    <= then.memory_kib + then.memory_kib / 10 + servers * DIAL_MEMORY_KIB
                && logged <= most_lines;
            ensure!(is_flat, "{figure}, at most {most_lines} lines");
        }
        Ok(())
    }
}

/// Loses everything of a traffic class from some moment on, and checks that both ends mark each
/// other suspect, then dead.
async fn silence(run: Run, class: TrafficClass, busy: bool) -> Result<()> {
    let clocks = run.clocks;
    let site = Site::up(run).await?;
    let pipe = site.node_client.talk_if(busy).await?;
    let old = *site.ids().first().context("no session")?;
    let began = Instant::now();
    site.link.set(class, Impairment::black_hole());
    let (suspect, dead) = (
        clocks.bound(if busy { SUSPECT_BUSY } else { SUSPECT_IDLE }),
        clocks.bound(DEAD),
    );
    let patience = scaled(dead) + GIVE_UP;
    let (server_suspects, agent_suspects, server_lost, agent_lost) = tokio::join!(
        site.server_suspects(began, patience),
        site.agent_suspects(began, patience),
        site.server_lost(old, began, patience),
        site.agent_lost(began, patience),
    );
    run.within("server suspects the agent", suspect, server_suspects)?;
    run.within("agent suspects the server", suspect, agent_suspects)?;
    run.within("server closes the dead session", dead, server_lost)?;
    run.within("agent closes the dead session", dead, agent_lost)?;
    if let Some(pipe) = pipe {
        let observed = until(Instant::now(), scaled(FINISH), async || pipe.has_ended()).await;
        run.observed("stream's reset reported after that", observed);
        let ends = pipe.finish(scaled(FINISH)).await;
        run.equal_or_reset("stream's bytes equal, or the cut reported", &ends)?;
    }
    site.link.heal();
    let healed = Instant::now();
    let requester = &site.node_client.requester;
    let served = requester.serving(healed, scaled(GIVE_UP)).await;
    run.observed("served after the heal", served);
    site.node_client.ensure_equal(run)
}

const BRIEF: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(30);
const ENDLESS: Duration = Duration::from_secs(600);
/// Longer than a session lives without any arrival.
const ENDLESS_SHORT: Duration = Duration::from_secs(20);
const ASK_SELDOM: Duration = Duration::from_secs(10);
/// Descriptors of dials in progress.
const DIALING: u64 = 8;
/// The memory that dials of one server use, or that the allocator retains of them: quinn's receive
/// buffer, 32 messages of 64 datagrams of 1472 bytes each, of two sockets that have been closed and
/// of the two sockets of a dial in progress.
const DIAL_MEMORY_KIB: u64 = 4 * 32 * 64 * 1472 / 1024;
const SUSPECT_BUSY: Duration = Duration::from_secs(5);
const SUSPECT_IDLE: Duration = Duration::from_secs(15);
const DEAD: Duration = Duration::from_secs(60);
const ASK_EVERY: Duration = Duration::from_secs(2);
/// Far beyond any bound of the measured values.
const GIVE_UP: Duration = Duration::from_secs(45);
/// Time limit for the rest of a stream, which may still wait for a retransmission.
const FINISH: Duration = Duration::from_secs(40);
