//! The suite that every transport must pass: one meaning of open, refuse, half-close, reset, drop and close.
//!
//! `contract!` runs every rule on a transport; a transport gives a function that makes two joined sessions, the opener
//! (the server's side) and the acceptor (the agent's side).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::{ClosedBy, Session, SessionError, Stream, StreamCut, cause_in};
use crate::identity::{PeerIdentity, Role};
use crate::wire::code::{CloseCode, RefusalCode, ResetCode};
use crate::wire::header::{Refusal, StreamHeader, StreamKind, Target};
use crate::wire::name::Port;

/// Two joined sessions, and whatever must live as long as they do.
struct Pair {
    opener: Arc<dyn Session>,
    acceptor: Arc<dyn Session>,
    _keep: Box<dyn Send>,
}

const PATIENCE: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;

fn header() -> StreamHeader {
    StreamHeader::new(StreamKind::Target(Target::Node(Port::new(9100).unwrap())))
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.expect("out of patience")
}

impl Pair {
    async fn open(&self) -> Stream {
        within(self.opener.open(&header(), PATIENCE)).await.unwrap()
    }

    async fn accept(&self) -> Stream {
        let incoming = within(self.acceptor.accept()).await.unwrap();
        let (got, stream) = incoming.header(Instant::now() + PATIENCE).await.unwrap();
        assert_eq!(got, header());
        stream
    }

    /// A stream from opener to acceptor, accepted.
    async fn stream(&self) -> (Stream, Stream) {
        let mut opened = self.open().await;
        let mut accepted = self.accept().await;
        accepted.accept("127.0.0.1:9100").await.unwrap();
        assert_eq!(within(opened.accepted()).await.unwrap(), "127.0.0.1:9100");
        (opened, accepted)
    }
}

async fn read_all(stream: &mut Stream) -> io::Result<Vec<u8>> {
    let mut got = Vec::new();
    within(stream.read_to_end(&mut got)).await.map(|_| got)
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..251u8).cycle().take(bytes).collect()
}

async fn bytes_and_half_closes_pass_both_ways(pair: Pair) {
    for (question, answer) in [(0, 3 * MIB), (3 * MIB, 0), (MIB, 3 * MIB)] {
        let (mut opened, mut accepted) = pair.stream().await;
        let (asked, told) = tokio::join!(
            async {
                opened.write_all(&pattern(question)).await.unwrap();
                opened.shutdown().await.unwrap();
                read_all(&mut opened).await.unwrap()
            },
            async {
                let got = read_all(&mut accepted).await.unwrap();
                accepted.write_all(&pattern(answer)).await.unwrap();
                accepted.shutdown().await.unwrap();
                got
            }
        );
        assert!(asked == pattern(answer) && told == pattern(question));
        assert_eq!(opened.bytes().read(), (answer as u64, question as u64));
    }
}

async fn data_may_follow_the_header_before_the_reply(pair: Pair) {
    let mut opened = pair.open().await;
    opened.write_all(b"early").await.unwrap();
    let mut accepted = pair.accept().await;
    let mut got = [0; 5];
    within(accepted.read_exact(&mut got)).await.unwrap();
    assert_eq!(&got, b"early");
    accepted.accept("").await.unwrap();
    accepted.write_all(b"answer").await.unwrap();
    accepted.shutdown().await.unwrap();
    assert_eq!(read_all(&mut opened).await.unwrap(), b"answer");
}

async fn refusal_arrives_with_its_detail_after_optimistic_data(pair: Pair) {
    for _ in 0..20 {
        let mut opened = pair.open().await;
        opened.write_all(&pattern(64 << 10)).await.unwrap();
        let accepted = pair.accept().await;
        accepted
            .refuse(RefusalCode::TargetRefused, "no such port")
            .await;
        let error = read_all(&mut opened).await.unwrap_err();
        let refusal = cause_in::<Refusal>(&error).unwrap();
        assert_eq!(
            (refusal.code, refusal.detail.as_str()),
            (RefusalCode::TargetRefused, "no such port")
        );
        // A writer that learns of it first must hear the same reason.
        let mut opened = pair.open().await;
        pair.accept()
            .await
            .refuse(RefusalCode::Policy, "not allowed")
            .await;
        let error = within(async {
            loop {
                if let Err(error) = opened.write_all(&pattern(4096)).await {
                    return error;
                }
            }
        })
        .await;
        assert_eq!(
            cause_in::<Refusal>(&error).unwrap().code,
            RefusalCode::Policy
        );
    }
}

async fn dropped_stream_is_a_cut_and_never_a_clean_end(pair: Pair) {
    let (mut opened, mut accepted) = pair.stream().await;
    accepted.write_all(&pattern(1000)).await.unwrap();
    drop(accepted);
    let error = read_all(&mut opened).await.unwrap_err();
    assert_eq!(
        cause_in::<StreamCut>(&error),
        Some(&StreamCut::Reset(ResetCode::Dropped))
    );

    let (mut opened, mut accepted) = pair.stream().await;
    opened.write_all(&pattern(1000)).await.unwrap();
    drop(opened);
    assert!(read_all(&mut accepted).await.is_err());
}

async fn reset_cuts_both_directions_with_its_code(pair: Pair) {
    let (mut opened, mut accepted) = pair.stream().await;
    accepted.reset(ResetCode::PeerCut);
    let error = read_all(&mut opened).await.unwrap_err();
    assert_eq!(
        cause_in::<StreamCut>(&error),
        Some(&StreamCut::Reset(ResetCode::PeerCut))
    );
    let error = within(async {
        loop {
            if let Err(error) = opened.write_all(&pattern(4096)).await {
                return error;
            }
        }
    })
    .await;
    assert!(
        matches!(cause_in::<StreamCut>(&error), Some(StreamCut::Stopped(_))),
        "{error:?}"
    );
}

async fn finished_half_survives_the_drop_of_its_stream(pair: Pair) {
    for _ in 0..20 {
        let (mut opened, mut accepted) = pair.stream().await;
        let sent = pattern(MIB);
        let (got, ()) = tokio::join!(read_all(&mut opened), async {
            accepted.write_all(&sent).await.unwrap();
            accepted.shutdown().await.unwrap();
            drop(accepted);
        });
        assert!(got.unwrap() == sent);
    }
}

async fn reply_that_does_not_come_is_given_up(pair: Pair) {
    let mut silent = pair
        .opener
        .open(&header(), Duration::from_millis(50))
        .await
        .unwrap();
    let _accepted = pair.accept().await;
    let error = within(silent.accepted()).await.unwrap_err();
    assert_eq!(
        cause_in::<StreamCut>(&error),
        Some(&StreamCut::ReplyTimeout)
    );
}

async fn many_streams_run_at_once(pair: Pair) {
    pair.acceptor.allow_streams(2000);
    let acceptor = pair.acceptor.clone();
    let mut echoes = JoinSet::new();
    let server = async {
        for _ in 0..1000 {
            let incoming = within(acceptor.accept()).await.unwrap();
            echoes.spawn(async move {
                let (_, mut stream) = incoming.header(Instant::now() + PATIENCE).await.unwrap();
                stream.accept("").await.unwrap();
                let got = read_all(&mut stream).await.unwrap();
                stream.write_all(&got).await.unwrap();
                within(stream.shutdown()).await.unwrap();
            });
        }
    };
    let mut callers = JoinSet::new();
    for index in 0..1000usize {
        let opener = pair.opener.clone();
        callers.spawn(async move {
            let mut stream = within(opener.open(&header(), PATIENCE)).await.unwrap();
            let sent = pattern(index % 5000);
            stream.write_all(&sent).await.unwrap();
            within(stream.shutdown()).await.unwrap();
            assert!(read_all(&mut stream).await.unwrap() == sent);
        });
    }
    tokio::join!(server, async {
        while callers.join_next().await.transpose().unwrap().is_some() {}
    });
    while echoes.join_next().await.transpose().unwrap().is_some() {}
    // The last streams leave the count when their tasks are gone.
    assert_eq!(pair.opener.health().streams, 0);
}

async fn burst_of_resets_leaves_the_session_usable(pair: Pair) {
    pair.acceptor.allow_streams(2000);
    for _ in 0..1000 {
        drop(pair.open().await);
        drop(within(pair.acceptor.accept()).await.unwrap());
    }
    let (mut opened, mut accepted) = pair.stream().await;
    accepted.write_all(b"still here").await.unwrap();
    accepted.shutdown().await.unwrap();
    assert_eq!(read_all(&mut opened).await.unwrap(), b"still here");
}

async fn stalled_readers_do_not_stop_others(pair: Pair) {
    pair.acceptor.allow_streams(200);
    let mut stalled = Vec::new();
    for _ in 0..16 {
        let (opened, mut accepted) = pair.stream().await;
        let filled = timeout(Duration::from_millis(100), async {
            while accepted.write_all(&pattern(MIB)).await.is_ok() {}
        });
        assert!(
            filled.await.is_err(),
            "a stalled stream must block its writer"
        );
        stalled.push((opened, accepted));
    }
    for _ in 0..20 {
        let (mut opened, mut accepted) = pair.stream().await;
        let (got, ()) = tokio::join!(read_all(&mut opened), async {
            within(accepted.write_all(&pattern(MIB))).await.unwrap();
            within(accepted.shutdown()).await.unwrap();
        });
        assert_eq!(got.unwrap().len(), MIB);
    }
}

async fn probe_is_acknowledged(pair: Pair) {
    let before = pair.opener.health().acknowledged;
    pair.opener.probe();
    within(async {
        while pair.opener.health().acknowledged == before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

async fn close_delivers_what_was_sent_and_its_reason(pair: Pair) {
    let (mut opened, mut accepted) = pair.stream().await;
    let sent = pattern(MIB);
    let reader = async {
        let got = read_all(&mut opened).await.unwrap();
        (got, within(pair.opener.closed()).await)
    };
    let writer = async {
        accepted.write_all(&sent).await.unwrap();
        accepted.shutdown().await.unwrap();
        drop(accepted);
        pair.acceptor.close(CloseCode::Draining, "going away").await;
    };
    let ((got, reason), ()) = tokio::join!(reader, writer);
    assert!(got == sent);
    assert_eq!(
        (reason.by, reason.code, reason.reason.as_str()),
        (ClosedBy::Peer, CloseCode::Draining, "going away")
    );
    assert_eq!(within(pair.acceptor.closed()).await.by, ClosedBy::Local);
    assert!(matches!(
        pair.opener.open(&header(), PATIENCE).await,
        Err(SessionError::Closed(_))
    ));
}

async fn close_cuts_open_streams(pair: Pair) {
    let (mut opened, _accepted) = pair.stream().await;
    pair.acceptor.close(CloseCode::Normal, "").await;
    let error = read_all(&mut opened).await.unwrap_err();
    assert_eq!(cause_in::<StreamCut>(&error), Some(&StreamCut::SessionLost));
}

async fn session_that_stopped_opening_keeps_its_streams(pair: Pair) {
    let (mut opened, mut accepted) = pair.stream().await;
    pair.opener.stop_opening();
    assert!(matches!(
        pair.opener.open(&header(), PATIENCE).await,
        Err(SessionError::NotOpening)
    ));
    accepted.write_all(b"on").await.unwrap();
    accepted.shutdown().await.unwrap();
    assert_eq!(read_all(&mut opened).await.unwrap(), b"on");
}

macro_rules! contract {
    ($transport:ident, $pair:path) => {
        mod $transport {
            contract!(@rules $pair;
                bytes_and_half_closes_pass_both_ways,
                data_may_follow_the_header_before_the_reply,
                refusal_arrives_with_its_detail_after_optimistic_data,
                dropped_stream_is_a_cut_and_never_a_clean_end,
                reset_cuts_both_directions_with_its_code,
                finished_half_survives_the_drop_of_its_stream,
                reply_that_does_not_come_is_given_up,
                many_streams_run_at_once,
                burst_of_resets_leaves_the_session_usable,
                stalled_readers_do_not_stop_others,
                probe_is_acknowledged,
                close_delivers_what_was_sent_and_its_reason,
                close_cuts_open_streams,
                session_that_stopped_opening_keeps_its_streams,
            );
        }
    };
    (@rules $pair:path; $($rule:ident,)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $rule() {
                super::$rule($pair().await).await;
            }
        )+
    };
}

contract!(memory, super::memory_pair);
contract!(quic, super::quic_pair);

fn agent() -> Role {
    Role::Agent("worker-1".parse().unwrap())
}

async fn memory_pair() -> Pair {
    let identity = |role| PeerIdentity {
        role,
        not_after: std::time::SystemTime::UNIX_EPOCH,
    };
    let (opener, acceptor) = super::memory::pair(identity(Role::Server), identity(agent()));
    Pair {
        opener,
        acceptor,
        _keep: Box::new(()),
    }
}

async fn quic_pair() -> Pair {
    use super::quic::{QuicAcceptor, QuicDialer, QuicKeys, QuicSettings};
    use super::{Acceptor as _, Dialer as _};

    let ca = crate::tls::test_ca::TestCa::new();
    let settings = QuicSettings {
        stream_window: 2 << 20,
        connection_window: 512 << 20,
        keep_alive: Some(Duration::from_secs(5)),
        idle_timeout: Duration::from_secs(60),
    };
    let keys = QuicKeys::from_bytes(&[7; QuicKeys::LEN]);
    let server = crate::tls::session_server(ca.resolver(&Role::Server), ca.roots()).unwrap();
    let listener =
        QuicAcceptor::bind(([127, 0, 0, 1], 0).into(), server, &keys, &settings).unwrap();
    let client =
        crate::tls::session_client(ca.key(&agent()), crate::tls::Trust::Roots(ca.roots())).unwrap();
    let dialer = QuicDialer::new(client, settings).unwrap();
    let address = listener.local_addr().unwrap();
    let (accepted, dialled) = tokio::join!(
        async {
            let (_, handshake) = listener.accept().await.unwrap();
            handshake.await.unwrap()
        },
        async { dialer.dial(address).await.unwrap() }
    );
    assert_eq!(accepted.peer().role, agent());
    assert_eq!(dialled.peer().role, Role::Server);
    Pair {
        opener: accepted,
        acceptor: dialled,
        _keep: Box::new((listener, dialer)),
    }
}
