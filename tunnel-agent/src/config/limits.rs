//! The `limits:` section of the file: every limit and timer of the agent by name.

use std::time::Duration;

use tunnel_process::host::Resources;
use tunnel_process::limits::{AutoBufferPool, check_buffer_pool, count, duration, size};
use tunnel_process::settings::{ConfigErrors, optional, parse_size};
use tunnel_proto::session::LivenessLimits;

tunnel_process::limits! {
    /// Time limit for resolving a server, for dialing it until the session is ready, and for each
    /// step of enrollment.
    handshake_timeout ("handshakeTimeout", counted as HandshakeTimeout): Duration = "5s", duration;
    /// Time limit for connecting to a target, over all its addresses. The server may request less.
    target_dial_timeout ("targetDialTimeout", counted as TargetDialTimeout): Duration
        = "5s", duration, live;
    /// Time limit for the header of a stream to arrive.
    request_head_timeout ("requestHeadTimeout", counted as RequestHeadTimeout): Duration
        = "10s", duration, live;
    /// Bytes of one stream that may be in flight and unread, from 64KiB to 64MiB. Over h2 up to
    /// 8MiB on a long path, while few streams are open.
    stream_window ("streamWindow"): u32 = "2MiB", size(64 << 10, 64 << 20);
    /// Streams served at once, from 1 to 65536; more are refused. The default is twice the server's
    /// limit, since a stream ends at the server first.
    streams_per_agent ("streamsPerAgent", counted as StreamsPerAgent): u32 = "512", count(1 << 16);
    /// Connections to `--cloud-listen` served at once, from 1 to 65536; more are reset. One address has
    /// at most three quarters of them.
    cloud_streams ("cloudStreams", counted as CloudStreams): u32 = "1024", count(1 << 16);
    /// Memory for data that servers may have sent and targets have not read, at least 4 x
    /// streamWindow. It is reserved before a server may send. When stalled targets of one session hold
    /// half of it, the server refuses the callers with the most unread data. auto: half of the
    /// memory limit, at most 256MiB.
    buffer_pool ("bufferPool", counted as BufferPool): Option<u64>
        = "auto", optional("auto", parse_size);
    /// Interval between keep-alives of an idle session (+- 20 %).
    keep_alive ("keepAlive"): Duration = "5s", duration;
    /// A session that is silent, or loses all data, for this long while requests wait is suspect:
    /// another session is dialed in parallel.
    suspect_after_busy ("suspectAfterBusy", counted as SuspectAfterBusy): Duration = "5s", duration;
    /// Like suspectAfterBusy, but for a session without requests.
    suspect_after_idle ("suspectAfterIdle", counted as SuspectAfterIdle): Duration
        = "15s", duration;
    /// A session that is silent, or loses all data, for this long is dead: it is closed and its
    /// streams are cut.
    dead_after ("deadAfter", counted as DeadAfter): Duration = "60s", duration;
    /// Interval for reading the files of --cert-file, --key-file and --ca-file again.
    reload_every ("reloadEvery"): Duration = "10s", duration;
    /// Longest wait before the agent enrolls again with its token, after servers have stopped to trust
    /// the CA of its certificate. It doubles to ten times this.
    enroll_again ("enrollAgain"): Duration = "1m", duration;
    /// With --transport auto: time that one transport may give no answer before the other is tried
    /// in parallel.
    quic_head_start ("quicHeadStart", counted as QuicHeadStart): Duration = "3s", duration;
    /// Interval for trying QUIC while h2 carries the session.
    quic_probe_every ("quicProbeEvery"): Duration = "45s", duration;
    /// If QUIC is lost sooner than this after it took over from h2, it is tried again only after 2,
    /// 4, ... 30 minutes.
    quic_steady_after ("quicSteadyAfter"): Duration = "60s", duration;
}

impl Limits {
    /// Returns the liveness limits of sessions. The transport's keep-alive probes idle sessions.
    pub(crate) fn liveness(&self) -> LivenessLimits {
        LivenessLimits {
            keep_alive: self.keep_alive,
            suspect_after_busy: self.suspect_after_busy,
            suspect_after_idle: self.suspect_after_idle,
            dead_after: self.dead_after,
            probes_idle: false,
        }
    }

    /// Returns the memory for data that servers may send unread, in bytes.
    pub(crate) fn buffer_pool_bytes(&self, resources: Resources) -> u64 {
        BUFFER_POOL.bytes(self.buffer_pool, resources.memory, self.stream_window)
    }

    fn check_together(&self, errors: &mut ConfigErrors) {
        let keep_alive_max = self.keep_alive.mul_f64(KEEP_ALIVE_SPREAD);
        self.liveness().check(keep_alive_max, errors);
        check_buffer_pool(self.buffer_pool, self.stream_window, errors);
    }
}

/// The automatic size of the buffer pool. Unread data is most of what an agent needs memory for.
const BUFFER_POOL: AutoBufferPool = AutoBufferPool {
    memory_share: 2,
    max: 256 << 20,
};

/// Largest factor by which keep-alives are later than configured.
const KEEP_ALIVE_SPREAD: f64 = 1.2;

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(change: impl FnOnce(&mut RawLimits)) -> Vec<String> {
        let (mut raw, mut errors) = (RawLimits::default(), ConfigErrors::default());
        change(&mut raw);
        let _limits = Limits::check(&raw, &mut errors);
        errors
            .finish(())
            .map_or_else(|error| error.mistakes, |()| Vec::new())
    }

    #[test]
    fn contradicting_limits_are_reported_by_name() {
        assert_eq!(errors(|_| {}), [""; 0]);
        for (change, named) in [
            (
                (|raw| raw.suspect_after_busy = Some("16s".into())) as fn(&mut RawLimits),
                "limits.suspectAfterBusy: 16s is more than suspectAfterIdle, 15s",
            ),
            (
                |raw| raw.dead_after = Some("14s".into()),
                "limits.suspectAfterIdle: 15s is more than deadAfter, 14s",
            ),
            (
                |raw| raw.keep_alive = Some("13s".into()),
                "limits.keepAlive: 13s (up to 15s 600ms with jitter) is not less",
            ),
            (
                |raw| raw.buffer_pool = Some("7MiB".into()),
                "limits.bufferPool: 7MiB is less than 4 x streamWindow, 8MiB",
            ),
        ] {
            let found = errors(change);
            assert!(found.len() == 1 && found[0].starts_with(named), "{found:?}");
        }
        let found = errors(|raw| {
            raw.dead_after = Some("soon".into());
            raw.suspect_after_busy = Some("16s".into());
        });
        assert!(found.len() == 1 && found[0].starts_with("limits.deadAfter"));
    }
}
