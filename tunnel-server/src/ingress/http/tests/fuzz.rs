//! Random bytes through the request path as it is configured: hyper's parser, the routing decision,
//! the request to the target, the target's response, and the response to the caller. Runs are
//! seeded, so that a failure can be reproduced.
//!
//! `CULVERT_TEST_GEAR=full` selects a longer run.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

pub(in crate::ingress) mod exchange;
mod mutate;
mod strict;

use exchange::{Exchange, exchange};
use mutate::Mutator;
use strict::Parsed;

const HI: &[u8] = super::fixture::HI.as_bytes();

/// Runs `check` on pairs of mutated inputs, on all processors.
#[expect(clippy::print_stderr, reason = "figures of a longer run")]
pub(in crate::ingress) fn run(
    requests: &[&str],
    answers: &[&str],
    check: impl Fn(&[u8], &[u8]) -> bool + Sync,
) {
    // The same numbers as in the harness, which depends on this crate.
    let is_full = std::env::var("CULVERT_TEST_GEAR").is_ok_and(|gear| gear == "full");
    let executions: u64 = if is_full { 5_000_000 } else { 20_000 };
    let workers = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let (began, check) = (Instant::now(), &check);
    let routed: u64 = std::thread::scope(|scope| {
        let worker = |index| {
            let mut mutator = Mutator::new(1000 + index);
            let mut routed = 0;
            for _ in 0..executions.div_ceil(workers) {
                let request = mutator.mutate(requests);
                let answer = match answers {
                    [] => HI.to_vec(),
                    answers => mutator.mutate(answers),
                };
                let is_routed =
                    std::panic::catch_unwind(AssertUnwindSafe(|| check(&request, &answer)));
                let is_routed = is_routed.unwrap_or_else(|_| {
                    panic!(
                        "request {:?}\nanswer {:?}",
                        String::from_utf8_lossy(&request),
                        String::from_utf8_lossy(&answer)
                    )
                });
                routed += u64::from(is_routed);
            }
            routed
        };
        let workers: Vec<_> = (0..workers)
            .map(|index| scope.spawn(move || worker(index)))
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .sum()
    });
    eprintln!(
        "{executions} executions, {routed} reached a target, {:?}",
        began.elapsed()
    );
    // If almost no mutated input were routed, the run would prove nothing.
    assert!(
        routed * 10 > executions,
        "{routed} of {executions} reached a target"
    );
}

#[test]
fn what_is_routed_is_the_one_request() {
    run(mutate::REQUESTS, &[], |request, answer| {
        let Exchange {
            request_count,
            routed,
            faults,
            ..
        } = exchange(request, answer);
        for sent in &routed {
            sent.check();
            // Applies the same check to the whole head at once.
            if sent.number == 1 {
                assert!(!has_two_readings(request));
            }
        }
        // hyper must not find more requests than a strict reader, and the check of heads must find
        // the same ones as hyper.
        if let Some(strict_count) = strict_requests(request) {
            assert!(
                request_count <= strict_count,
                "{request_count} requests, strictly {strict_count}"
            );
            assert_eq!(faults, 0, "a plain head was refused");
        }
        !routed.is_empty()
    });
}

/// Returns the number of requests, if a strict reader finds nothing else.
fn strict_requests(mut bytes: &[u8]) -> Option<usize> {
    let mut count = 0;
    while !bytes.is_empty() {
        match strict::request(bytes) {
            Parsed::Whole(_, length) => bytes = &bytes[length..],
            Parsed::Begun | Parsed::Wrong(_) => return None,
        }
        count += 1;
    }
    Some(count)
}

/// Returns whether the first head has a line that ends with LF alone, or more than one framing.
fn has_two_readings(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request);
    let first = text.find(|byte| byte != '\r' && byte != '\n').unwrap_or(0);
    let end = ["\n\r\n", "\n\n"].into_iter();
    let end = end
        .filter_map(|end| Some(first + text[first..].find(end)? + end.len()))
        .min();
    let head = &text[..end.unwrap_or(text.len())];
    let framings = head.lines().skip(1).filter(|line| {
        let line = line.to_ascii_lowercase();
        line.starts_with("content-length:") || line.starts_with("transfer-encoding:")
    });
    let framings: Vec<_> = framings.collect();
    let codings = framings
        .iter()
        .filter(|line| line.starts_with(['t', 'T']))
        .count();
    let lengths = framings.len() - codings;
    let bare = head
        .split('\n')
        .rev()
        .skip(1)
        .any(|line| !line.ends_with('\r'));
    bare || lengths > 1 || (lengths > 0 && codings > 0)
}

#[test]
fn protocols_are_switched_only_as_asked_and_granted() {
    run(mutate::UPGRADES, mutate::ANSWERS, |request, answer| {
        let is_routed = exchange(request, answer);
        let Some(first) = is_routed.routed.first() else {
            return false;
        };
        first.check();
        let head = match strict::head_of(&is_routed.output) {
            // The first response that the caller receives belongs to the first request.
            Some(head) if first.number == 1 => head,
            Some(_) | None => return true,
        };
        let head = strict::answer_head(head).expect("a plain head");
        let asked = first.wanted.as_deref();
        let granted = strict::first_final(answer).and_then(|head| {
            (head.status == 101).then(|| head.all("upgrade").next().unwrap_or_default().to_owned())
        });
        let fits = matches!((asked, &granted), (Some(asked), Some(granted))
            if asked.split(',').any(|one| one.trim().eq_ignore_ascii_case(granted.trim())));
        if head.status == 101 {
            assert!(fits, "asked {asked:?}, granted {granted:?}");
        } else if asked.is_some() {
            assert!(head.all("connection").any(|value| value == "close"));
            assert_eq!(is_routed.request_count, 1, "a request behind it was read");
        }
        let ours = head.all("x-tunnel-error").count();
        assert!(ours == 0 || head.status >= 400);
        assert!(ours == 0 || is_routed.failed, "a forged code");
        assert_eq!(head.all("keep-alive").count(), 0);
        true
    });
}
