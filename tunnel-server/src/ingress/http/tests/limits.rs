//! Entries of `limits:` that requests meet, shortly before, at and beyond them: what the caller is told, and the metric.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, sleep};

use super::bench::{Bench, HI, get};
use crate::config::Limit;
use crate::testing::STREAMS;

fn reached(bench: &Bench, limit: Limit) -> u64 {
    let name = limit.name();
    bench.metric(&format!(
        "tunnel_server_limits_reached_total{{limit=\"{name}\"}}"
    ))
}

#[tokio::test(start_paused = true)]
async fn streams_per_agent_hold_for_one_below_at_and_above() {
    let bench = Bench::new();
    let agent = bench.agent();
    let request = format!("{}\r\n", get("/"));
    let mut open = Vec::new();
    // One below, and at it.
    for _ in 0..STREAMS {
        let mut caller = bench.connect();
        caller.write_all(request.as_bytes()).await.unwrap();
        open.push((caller, agent.accepts().await));
    }
    assert_eq!(reached(&bench, Limit::StreamsPerAgent), 0);
    let closing = format!("{}Connection: close\r\n\r\n", get("/"));
    let refused = bench.ask(&closing).await;
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    for part in [
        "X-Tunnel-Error: too_many_streams\r\n",
        "Retry-After: ",
        "limits.streamsPerAgent",
    ] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(reached(&bench, Limit::StreamsPerAgent), 1);
    // A place that comes back is taken at once.
    open.pop();
    let asked = async {
        // The place is given back by the task of the connection that ended.
        sleep(Duration::from_millis(1)).await;
        bench.ask(&closing).await
    };
    let (answer, _) = tokio::join!(asked, agent.answers());
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(reached(&bench, Limit::StreamsPerAgent), 1);
}

#[tokio::test(start_paused = true)]
async fn open_timeout_holds_shortly_before_and_after() {
    let bench = Bench::new();
    let agent = bench.agent();
    let limit = bench.doors.limits.open;
    let request = format!("{}Connection: close\r\n\r\n", get("/"));
    for (reply_after, status) in [
        (limit - Duration::from_millis(50), "200"),
        (limit + Duration::from_millis(50), "504"),
    ] {
        let began = Instant::now();
        let late = async {
            let mut stream = agent.stream().await;
            sleep(reply_after).await;
            // The opener may have given up by now.
            let _gave_up = async {
                stream.accept("").await?;
                stream.write_all(HI.as_bytes()).await?;
                stream.shutdown().await
            }
            .await;
        };
        let asked = async {
            let answer = bench.ask(&request).await;
            (answer, began.elapsed())
        };
        let ((answer, took), ()) = tokio::join!(asked, late);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{answer}"
        );
        assert!(took <= limit + Duration::from_millis(20), "{took:?}");
        let timed_out = status == "504";
        assert_eq!(
            answer.contains("(limits.openTimeout)"),
            timed_out,
            "{answer}"
        );
        assert_eq!(reached(&bench, Limit::OpenTimeout), u64::from(timed_out));
    }
}

#[tokio::test(start_paused = true)]
async fn silences_of_callers_are_counted_by_their_limit() {
    let bench = Bench::new();
    let agent = bench.agent();
    let (head_time, idle) = (
        bench.doors.limits.request_head_time,
        bench.doors.limits.idle,
    );
    let just = Duration::from_millis(20);
    let mut silent = bench.connect();
    silent.write_all(b"GET /").await.unwrap();
    let mut idler = bench.connect();
    let request = format!("{}\r\n", get("/"));
    tokio::join!(
        super::bench::hears_hi(&mut idler, &request),
        agent.answers()
    );
    sleep(head_time - just).await;
    assert_eq!(reached(&bench, Limit::RequestHeadTimeout), 0);
    sleep(2 * just).await;
    assert_eq!(reached(&bench, Limit::RequestHeadTimeout), 1);
    sleep(idle - head_time - 2 * just).await;
    assert_eq!(reached(&bench, Limit::CallerIdleTimeout), 0);
    sleep(3 * just).await;
    assert_eq!(reached(&bench, Limit::CallerIdleTimeout), 1);
    assert_eq!(reached(&bench, Limit::RequestHeadTimeout), 1);
}

#[tokio::test]
async fn oversize_heads_are_counted_by_their_limit() {
    let bench = Bench::new();
    let limit = bench.doors.limits.request_head_bytes;
    let mut caller = bench.connect();
    let begun = get("/");
    let write = async {
        caller.write_all(begun.as_bytes()).await?;
        caller.write_all(b"X: ").await?;
        caller.write_all(&vec![b'y'; limit]).await?;
        caller.write_all(b"\r\n\r\n").await
    };
    // The door may have answered and closed before all was taken.
    let _cut = write.await;
    crate::testing::eventually("counted", || reached(&bench, Limit::RequestHeadBytes) == 1).await;
}
