//! Rules of sessions that only h2's frames show.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::AsyncWriteExt;

use super::raw::{CANCEL, DATA, MAX_FRAME_SIZE, NO_ERROR, PING, RST_STREAM};
use super::*;
use crate::buffers::BUFFER_BYTES;
use crate::wire::code::RefusalCode;
use crate::wire::header::Refusal;

/// Starts a writer without end. Returns the number of bytes that it wrote.
fn bulk(mut stream: Stream) -> (Arc<AtomicU64>, JoinSet<()>) {
    let written = Arc::<AtomicU64>::default();
    let count = written.clone();
    let mut task = JoinSet::new();
    task.spawn(async move {
        while stream.write_all(&[0; 16 << 10]).await.is_ok() {
            count.fetch_add(16 << 10, Ordering::Relaxed);
        }
    });
    (written, task)
}

/// Waits until a writer makes no progress.
async fn stalled(written: &AtomicU64) {
    within(async {
        let mut before = u64::MAX;
        while written.load(Ordering::Relaxed) != before {
            before = written.load(Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_half_has_ended_only_when_it_is_written() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (filler, _) = opened(&session, &mut raw).await;
    let mut streams = Vec::new();
    for _ in 0..8 {
        streams.push(opened(&session, &mut raw).await.0);
    }
    let (written, _task) = bulk(filler);
    // Only a shutdown that waits shows whether the connection is full.
    let mut waits = None;
    let patience = scaled(Duration::from_millis(200));
    for mut stream in streams {
        stalled(&written).await;
        stream.write_all(b"last words").await.unwrap();
        let ended = timeout(patience, stream.shutdown()).await;
        if ended.is_err() {
            waits = Some(stream);
            break;
        }
    }
    let mut waits = waits.expect("every shutdown was ready before its end was written");
    let mut reading = JoinSet::new();
    reading.spawn(async move { raw.reader.watch().await });
    within(waits.shutdown()).await.unwrap();
}

/// h2 reads nothing while a PING or its answer waits for the socket. Two ends that send much would
/// wait for each other for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn end_whose_socket_takes_nothing_receives_behind_pings() {
    for probes in [false, true] {
        let (session, mut raw) = with_raw_agent(WIDE).await;
        let (mut asked, id) = opened(&session, &mut raw).await;
        let (written, _tasks) = full_socket(&session, &mut raw).await;
        let question = if probes {
            session.probe();
            None
        } else {
            raw.send(&raw::frame(PING, 0, 0, b"question")).await;
            Some(b"question")
        };
        for _ in 0..100 {
            raw.send_data(id, 0, &[0; 1024]).await;
        }
        raw.send_data(id, END_STREAM, b"answer").await;
        assert_eq!(read_all(&mut asked).await.unwrap().len(), 100 * 1024 + 6);
        // What was kept for the socket arrives whole and in order.
        let mut received = 0;
        let ping = loop {
            let frame = within(raw.reader.next()).await.unwrap();
            match frame.kind {
                DATA => received += frame.payload.len() as u64,
                PING => break frame,
                _window => {}
            }
        };
        assert_eq!(ping.flags, if probes { 0 } else { ACK });
        if let Some(question) = question {
            assert_eq!(ping.payload[..], question[..]);
        }
        let before = written.load(Ordering::Relaxed);
        while received < before {
            received += within(raw.reader.next_of_kind(DATA)).await.payload.len() as u64;
        }
    }
}

/// Writes to streams of the session until the socket takes no more.
async fn full_socket(
    session: &Arc<dyn Session>,
    raw: &mut RawPeer,
) -> (Arc<AtomicU64>, JoinSet<()>) {
    let (filler, _) = opened(session, raw).await;
    let (written, task) = bulk(filler);
    stalled(&written).await;
    (written, task)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_stopped_half_sends_is_dropped_and_its_window_given_back() {
    // The sent half cannot end, because there is no window for its reply.
    let windows = Windows {
        stream: 0,
        connection: 0,
    };
    let (session, mut raw) = with_raw_server(STREAMS, windows).await;
    open_raw(&mut raw, 3).await;
    let stream = accepted(&session).await;
    let mut refusal = JoinSet::new();
    refusal.spawn(async move { stream.refuse(RefusalCode::Policy, "no").await });
    within(raw.fill(3, u64::from(WINDOW) * 40, 0)).await;
    assert!(refusal.try_join_next().is_none());
    raw.send(&raw::window_update(3, 1000)).await;
    let reply = within(raw.reader.next_of_kind(DATA)).await;
    assert!(reply.ends());
    let reply = reply.payload;
    assert_eq!(
        reply,
        reply_bytes(&StreamReply::refused(RefusalCode::Policy, "no"))
    );
    // The sent half is complete, so our end can report that it reads no more.
    let reset = within(raw.reader.next_of_kind(RST_STREAM)).await;
    assert_eq!((reset.stream, reset.code()), (3, NO_ERROR));
    within(refusal.join_all()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_bytes_of_ended_streams_do_not_block_other_streams() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let mut unread = Vec::new();
    // More than the connection's window at first. It grows by what nobody has begun to read.
    for _ in 0..32 {
        unread.push(within(session.open(&header(), TEST_TIMEOUT)).await.unwrap());
        let id = within(raw.reader.next_of_kind(HEADERS)).await.stream;
        raw.send(&raw::response(id)).await;
        raw.send_data(id, 0, &reply_bytes(&accepted_reply("")))
            .await;
        within(raw.fill(id, ALMOST_WINDOW, END_STREAM)).await;
    }
    for mut stream in unread {
        let got = read_all(&mut stream).await.unwrap();
        assert_eq!(got.len() as u64, ALMOST_WINDOW);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reset_behind_a_whole_answer_stops_the_writer_only() {
    for (code, meaning) in [
        (NO_ERROR, ResetCode::Dropped),
        (CANCEL, ResetCode::Dropped),
        (0x1003, ResetCode::Refused),
    ] {
        let (session, mut raw) = with_raw_agent(WIDE).await;
        let (mut stream, id) = opened(&session, &mut raw).await;
        let answer = raw::frame(DATA, END_STREAM, id, b"whole answer");
        raw.send(&[answer, raw::reset(id, code)].concat()).await;
        assert_eq!(read_all(&mut stream).await.unwrap(), b"whole answer");
        let error = within(async {
            loop {
                if let Err(error) = stream.write_all(b"more").await {
                    return error;
                }
            }
        })
        .await;
        let cut = find_cause::<StreamCut>(&error);
        assert_eq!(cut, Some(&StreamCut::Stopped(meaning)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_is_read_although_a_reset_follows_it() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let mut stream = within(session.open(&header(), TEST_TIMEOUT)).await.unwrap();
    let id = within(raw.reader.next_of_kind(HEADERS)).await.stream;
    let reply = reply_bytes(&StreamReply::refused(RefusalCode::Policy, "no"));
    let reply = [
        raw::response(id),
        raw::frame(DATA, END_STREAM, id, &reply),
        raw::reset(id, NO_ERROR),
    ];
    raw.send(&reply.concat()).await;
    let error = within(async {
        loop {
            if let Err(error) = stream.write_all(&[0; 4096]).await {
                return error;
            }
        }
    })
    .await;
    assert_eq!(
        find_cause::<Refusal>(&error).unwrap().code,
        RefusalCode::Policy
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reset_without_an_end_is_a_cut_whatever_its_code() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    for (code, meaning) in [
        (NO_ERROR, ResetCode::Dropped),
        (CANCEL, ResetCode::Dropped),
        (0xfff, ResetCode::Dropped),
        (0x1000, ResetCode::Dropped),
        (0x1001, ResetCode::PeerCut),
        (0x1002, ResetCode::Protocol),
        (0x1003, ResetCode::Refused),
        (0x1004, ResetCode::SessionLost),
        (0x1000 + 77, ResetCode::Unknown(77)),
        (u32::MAX, ResetCode::Unknown(u32::MAX - 0x1000)),
    ] {
        let (mut stream, id) = opened(&session, &mut raw).await;
        let part = raw::frame(DATA, 0, id, b"part");
        raw.send(&[part, raw::reset(id, code)].concat()).await;
        assert_eq!(cut(&mut stream).await, StreamCut::Reset(meaning), "{code}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn codes_of_resets_are_ours_and_4096() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    for (code, number) in [
        (ResetCode::Dropped, 0x1000),
        (ResetCode::PeerCut, 0x1001),
        (ResetCode::Protocol, 0x1002),
        (ResetCode::Refused, 0x1003),
        (ResetCode::Unknown(77), 0x1000 + 77),
        (ResetCode::Unknown(u32::MAX), u32::MAX),
    ] {
        let (mut stream, id) = opened(&session, &mut raw).await;
        stream.cut_behind(code);
        let reset = within(raw.reader.next_of_kind(RST_STREAM)).await;
        assert_eq!((reset.stream, reset.code()), (id, number));
    }
    let (stream, id) = opened(&session, &mut raw).await;
    drop(stream);
    let reset = within(raw.reader.next_of_kind(RST_STREAM)).await;
    assert_eq!((reset.stream, reset.code()), (id, 0x1000));
}

#[tokio::test]
async fn small_writes_leave_together() {
    const WRITES: usize = 1000;
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (mut stream, id) = opened(&session, &mut raw).await;
    for _ in 0..WRITES {
        stream.write_all(b"x").await.unwrap();
        stream.flush().await.unwrap();
    }
    let (mut frames, mut bytes) = (0, 0);
    while bytes < WRITES {
        let frame = within(raw.reader.next_of_kind(DATA)).await;
        assert_eq!(frame.stream, id);
        (frames, bytes) = (frames + 1, bytes + frame.payload.len());
    }
    assert!(bytes == WRITES && frames < 10, "{frames} frames");
}

#[tokio::test]
async fn full_buffer_leaves_in_one_frame() {
    let (session, mut raw) = with_raw_agent(WIDE).await;
    raw.send(&raw::settings(&[(MAX_FRAME_SIZE, FRAME_MAX_BYTES)]))
        .await;
    // The settings are in effect when the mark behind them is answered.
    within(raw.flood(&[], 1)).await;
    let (mut stream, id) = opened(&session, &mut raw).await;
    let mut data = Bytes::from(vec![7; BUFFER_BYTES]);
    let sent = within(std::future::poll_fn(|cx| stream.poll_send(cx, &mut data))).await;
    assert_eq!(sent.unwrap(), BUFFER_BYTES);
    let frame = within(raw.reader.next_of_kind(DATA)).await;
    assert_eq!(frame.stream, id);
    assert!(frame.payload == vec![7; BUFFER_BYTES]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_window_grows_on_a_long_path() {
    const RTT: Duration = Duration::from_millis(20);
    let (session, mut raw) = with_raw_agent(WIDE).await;
    let (mut stream, id) = opened(&session, &mut raw).await;
    let mut reading = JoinSet::new();
    reading.spawn(async move {
        let mut buffer = vec![0; MIB];
        while stream.read(&mut buffer).await.is_ok_and(|count| count > 0) {}
    });
    let setting = within(async {
        let mut question: Option<Bytes> = None;
        loop {
            // Little enough for the first window, and more than a quarter of it.
            for _ in 0..10 {
                raw.send_data(id, 0, &[0; 16 << 10]).await;
            }
            tokio::time::sleep(RTT).await;
            if let Some(question) = question.take() {
                raw.send(&raw::frame(PING, ACK, 0, &question)).await;
            }
            let pause = Duration::from_millis(1);
            while let Ok(frame) = timeout(pause, raw.reader.next()).await {
                let frame = frame.expect("connection has gone");
                match frame.kind {
                    PING => question = Some(frame.payload),
                    SETTINGS if frame.flags & ACK == 0 => return frame.payload,
                    _other => {}
                }
            }
        }
    })
    .await;
    let id = INITIAL_WINDOW_SIZE.to_be_bytes();
    assert_eq!(setting, [&id[..], &(2 * WINDOW).to_be_bytes()].concat());
    raw.send(&raw::frame(SETTINGS, ACK, 0, &[])).await;
    assert_serves_raw_agent(&session, &mut raw).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_answer_does_not_wait_behind_bulk() {
    // Either the connection itself is the bottleneck, or its window.
    for connection in [1 << 30, 0] {
        let stream = 1 << 30;
        let (session, mut raw) = with_raw_agent(Windows { stream, connection }).await;
        let (first, _) = opened(&session, &mut raw).await;
        let (second, _) = opened(&session, &mut raw).await;
        let (mut small, id) = opened(&session, &mut raw).await;
        let tasks = [bulk(first), bulk(second)];
        // No data is read until both are full.
        for (written, _) in &tasks {
            stalled(written).await;
        }
        small.write_all(&[1; 1024]).await.unwrap();
        let mut before = 0;
        loop {
            let frame = within(raw.reader.next_of_kind(DATA)).await;
            if frame.stream == id {
                break;
            }
            let count = frame.payload.len();
            before += count;
            let count = u32::try_from(count).unwrap();
            raw.send(&raw::window_update(0, count)).await;
        }
        assert!(before < MIB, "{before} bytes came first");
    }
}

/// The peer grants no further window, so that others lack what a waiting stream holds.
#[tokio::test]
async fn streams_that_wait_for_others_leave_window_to_a_small_message() {
    const PIECE: u32 = 60 << 10;
    let windows = Windows {
        stream: 1 << 20,
        connection: 20 * PIECE,
    };
    let (session, mut raw) = with_raw_agent(windows).await;
    let mut streams = Vec::new();
    for _ in 0..40 {
        streams.push(opened(&session, &mut raw).await.0);
    }
    // The raw agent reads none of it. The kernel takes the pieces of some streams, the others wait.
    for stream in &mut streams {
        within(stream.write_all(&[7; PIECE as usize]))
            .await
            .unwrap();
    }
    let _small = within(session.open(&header(), TEST_TIMEOUT)).await.unwrap();
    let sent = async { while raw.reader.next_of_kind(DATA).await.payload[..] != header_bytes() {} };
    within(sent).await;
}
