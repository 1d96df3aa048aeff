use super::*;

const PLAIN: &str = "GET / HTTP/1.1\r\nHost: worker-1:9100\r\n\r\n";

/// Returns the result of a check for a head that arrives in pieces of this size.
fn head_error(head: &str, piece: usize) -> Option<HeadError> {
    let mut check = HeadCheck::default();
    for piece in head.as_bytes().chunks(piece) {
        check.read(piece);
    }
    let framing = check.heads.front().and_then(|run| run.head.framing);
    check.request(framing.unwrap_or(BodyFraming::Chunked))
}

/// Sends requests on one connection in pieces, and returns the errors in their heads. Each request
/// has the framing that hyper determines for it.
fn errors(requests: &[(&str, BodyFraming)], piece: usize) -> Vec<Option<HeadError>> {
    let mut check = HeadCheck::default();
    let all: String = requests.iter().map(|(request, _)| *request).collect();
    for piece in all.as_bytes().chunks(piece) {
        check.read(piece);
    }
    let framings = requests.iter().map(|(_, framing)| *framing);
    framings.map(|framing| check.request(framing)).collect()
}

#[test]
fn heads_with_two_readings_are_found_however_they_are_split() {
    let both = "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n";
    let both_apart = "TRANSFER-ENCODING:chunked\r\nX: y\r\ncontent-length:3\r\n";
    let twice = "Content-Length: 3\r\nContent-Length: 3\r\n";
    let twice_apart = "Content-Length: 3\r\nX: y\r\ncontent-length: 4\r\n";
    let two_codings = "Transfer-Encoding: gzip\r\ntransfer-encoding: chunked\r\n";
    for (head, expected) in [
        (PLAIN.to_owned(), None),
        (format!("\r\n\r\n{PLAIN}"), None),
        (format!("\n{PLAIN}"), Some(HeadError::BareLf)),
        (PLAIN.replace("\r\n", "\n"), Some(HeadError::BareLf)),
        (PLAIN.replacen("\r\n", "\n", 1), Some(HeadError::BareLf)),
        (PLAIN.replace("9100\r\n", "9100\n"), Some(HeadError::BareLf)),
        (PLAIN.replace("\r\n\r\n", "\r\n\n"), Some(HeadError::BareLf)),
    ] {
        for piece in 1..=head.len() {
            assert_eq!(head_error(&head, piece), expected, "{head:?} by {piece}");
        }
    }
    for (fields, expected) in [
        ("Content-Length: 3\r\n", None),
        ("Transfer-Encoding: chunked\r\n", None),
        (two_codings, None),
        ("X-Content-Length: 3\r\nContent-Length: 3\r\n", None),
        ("Content-Length-X: 3\r\nContent-Length: 3\r\n", None),
        ("X: Content-Length: 3\r\nContent-Length: 3\r\n", None),
        ("Content-Lengths: 3\r\nTransfer-Encoding: chunked\r\n", None),
        (both, Some(HeadError::TwoFramings)),
        (both_apart, Some(HeadError::TwoFramings)),
        (twice, Some(HeadError::TwoLengths)),
        (twice_apart, Some(HeadError::TwoLengths)),
    ] {
        let head = PLAIN.replace("\r\n\r\n", &format!("\r\n{fields}\r\n"));
        for piece in 1..=head.len() {
            assert_eq!(head_error(&head, piece), expected, "{fields:?} by {piece}");
        }
    }
    // A request line is not a field.
    let line = "Content-Length: /a HTTP/1.1\r\nContent-Length: 3\r\n\r\n";
    assert_eq!(head_error(line, line.len()), None);
}

#[test]
fn heads_with_two_readings_are_found_behind_every_body() {
    let post = |fields: &str, body: &str| {
        let head = PLAIN.replace("GET", "POST");
        format!(
            "{}{fields}\r\n{body}",
            head.trim_end_matches("\r\n").to_owned() + "\r\n"
        )
    };
    let (length, coding) = ("Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n");
    let before = [
        (PLAIN.to_owned(), BodyFraming::Length(0)),
        (post(length, "hello"), BodyFraming::Length(5)),
        (post(length, "\n\na\r\n"), BodyFraming::Length(5)),
        (post(coding, "0\r\n\r\n"), BodyFraming::Chunked),
        (
            post(coding, "5\r\nhello\r\n0\r\n\r\n"),
            BodyFraming::Chunked,
        ),
        (
            post(coding, "5\r\n0\r\n\r\n\r\n0\r\n\r\n"),
            BodyFraming::Chunked,
        ),
        (
            post(coding, "1;a=b\r\n\n\r\n00;x\r\n\r\n"),
            BodyFraming::Chunked,
        ),
        (post(coding, "0\r\nX: y\r\n\r\n"), BodyFraming::Chunked),
    ];
    let bad = [
        (PLAIN.replace("\r\n", "\n"), HeadError::BareLf),
        (
            post(&format!("{length}{coding}"), ""),
            HeadError::TwoFramings,
        ),
        (
            post(&format!("{coding}{length}"), ""),
            HeadError::TwoFramings,
        ),
        (
            post(&format!("{length}{length}"), ""),
            HeadError::TwoLengths,
        ),
    ];
    for (first, framing) in &before {
        for (second, error) in &bad {
            let requests = [
                (&**first, *framing),
                (&**first, *framing),
                (second, BodyFraming::Chunked),
            ];
            for piece in [1, 2, 3, 7, 4096] {
                let found = errors(&requests, piece);
                let expected = [None, None, Some(*error)];
                assert_eq!(found, expected, "{first:?} {second:?} by {piece}");
            }
        }
    }
}

#[test]
fn every_request_is_refused_where_the_beginning_of_a_head_is_unknown() {
    let chunked = PLAIN.replace("\r\n\r\n", "\r\nTransfer-Encoding: chunked\r\n\r\n");
    let malformed = format!("{chunked}1\r\nab\r\n0\r\n\r\n");
    let long = PLAIN.replace("\r\n\r\n", "\r\nContent-Length: 9\r\n\r\n");
    let gzip = PLAIN.replace("\r\n\r\n", "\r\nTransfer-Encoding: gzip\r\n\r\n");
    let plain = (PLAIN, BodyFraming::Length(0));
    let unframed = Some(HeadError::Unframed);
    for (first, framing, error) in [
        (&*malformed, BodyFraming::Chunked, None),
        // hyper has determined another length.
        (PLAIN, BodyFraming::Length(1), unframed),
        (PLAIN, BodyFraming::Chunked, unframed),
        (&long, BodyFraming::Length(8), unframed),
        (&chunked, BodyFraming::Length(0), unframed),
        // The server refuses this one for its coding.
        (&gzip, BodyFraming::Chunked, None),
    ] {
        let found = errors(&[(first, framing), plain, plain], 4096);
        assert_eq!(found[0], error, "{first:?}");
        assert_eq!(found[2], unframed, "{first:?}");
    }
    let byte = PLAIN.replace("\r\n\r\n", "\r\nContent-Length: 1\r\n\r\nx");
    let pair = [plain, (&*byte, BodyFraming::Length(1))];
    let many: Vec<_> = pair.into_iter().cycle().take(RUNS_MAX + 1).collect();
    let found = errors(&many, usize::MAX);
    assert!(found[..RUNS_MAX].iter().all(Option::is_none));
    assert_eq!(found[RUNS_MAX], unframed, "more than hyper reads ahead");
    let alike: Vec<_> = std::iter::repeat_n(plain, 2 * RUNS_MAX).collect();
    let found = errors(&alike, usize::MAX);
    assert!(
        found.iter().all(Option::is_none),
        "as many as the caller likes"
    );
}

#[test]
fn nothing_is_checked_after_the_protocol_has_switched() {
    let bad = PLAIN.replace("\r\n", "\n");
    let opaque = BodyFraming::Opaque;
    for piece in [1, 4096] {
        let found = errors(&[(PLAIN, opaque), (&bad, opaque)], piece);
        assert_eq!(found, [None, None], "{piece}");
    }
}

/// Follows requests on one connection in pieces, with limits. Returns the offset of the head at which
/// the check stops, the number of bytes that it has followed, and the limit.
fn stop(input: &str, piece: usize, limits: HeadLimits) -> Option<(usize, usize, HeadExcess)> {
    let mut check = HeadCheck::new(limits);
    let (mut at, mut head) = (0, 0);
    for piece in input.as_bytes().chunks(piece) {
        let before = matches!(&check.state, State::Head(head) if head.size.bytes > 0);
        if let Some(stop) = check.read(piece) {
            let rest = &piece[stop.checked..];
            let HeadPhase::Excess(excess) = check.read_head(rest, limits).phase else {
                panic!("it goes on");
            };
            if !before || stop.head > 0 {
                head = at + stop.head;
            }
            return Some((head, at + stop.checked, excess));
        }
        at += piece.len();
        if let State::Head(begun) = &check.state {
            head = at - begun.size.bytes;
        }
    }
    None
}

#[test]
fn check_stops_at_the_byte_that_exceeds_a_limit_however_it_is_split() {
    let limits = |bytes, fields| HeadLimits { bytes, fields };
    let length = PLAIN.len();
    let target = format!(
        "GET /{} HTTP/1.1\r\nHost: a\r\n\r\n",
        "x".repeat(TARGET_MAX_BYTES)
    );
    let three = "GET / HTTP/1.1\r\nA: b\r\nC:\r\nD: e\r\n\r\n";
    let post = "POST / HTTP/1.1\r\nContent-Length: 40\r\n\r\n";
    let post = format!("{post}{}", "x".repeat(40));
    let (bytes, fields) = (HeadExcess::Bytes, HeadExcess::Fields);
    for (input, limits, expected) in [
        (PLAIN.to_owned(), limits(length, 1), None),
        (
            PLAIN.to_owned(),
            limits(length - 1, 1),
            Some((0, length - 1, bytes)),
        ),
        (PLAIN.to_owned(), limits(length, 0), Some((0, 16, fields))),
        (format!("{PLAIN}{PLAIN}"), limits(length, 1), None),
        (
            format!("{PLAIN}{PLAIN}\r\n"),
            limits(length - 1, 1),
            Some((0, length - 1, bytes)),
        ),
        // Empty lines before a request count for it.
        (
            format!("{PLAIN}\r\n{PLAIN}"),
            limits(length, 1),
            Some((length, 2 * length, bytes)),
        ),
        (three.to_owned(), limits(99, 3), None),
        (
            format!("{post}{three}"),
            limits(99, 2),
            Some((post.len(), post.len() + 26, fields)),
        ),
        (
            format!("{PLAIN}{target}"),
            HeadLimits::NONE,
            Some((length, length + 4 + TARGET_MAX_BYTES, HeadExcess::Target)),
        ),
        (target.replacen('x', "", 1), HeadLimits::NONE, None),
    ] {
        for piece in [1, 2, 3, 7, 16, 4096, usize::MAX] {
            let begin = &input[..input.len().min(60)];
            assert_eq!(
                stop(&input, piece, limits),
                expected,
                "{begin:?} by {piece}"
            );
        }
    }
}

#[test]
fn large_head_is_read_with_other_limits_from_where_the_check_has_stopped() {
    let small = HeadLimits {
        bytes: 20,
        fields: 1,
    };
    let mut check = HeadCheck::new(small);
    let input = format!("{PLAIN}GET /b");
    let stop = check.read(input.as_bytes()).unwrap();
    assert_eq!(
        stop,
        HeadStop {
            head: 0,
            checked: 20
        }
    );
    assert!(check.is_read());
    let progress = check.read_head(&input.as_bytes()[20..], HeadLimits::NONE);
    let size = HeadSize {
        bytes: PLAIN.len(),
        fields: 1,
    };
    assert_eq!(progress.phase, HeadPhase::End);
    assert_eq!((progress.checked, progress.size), (PLAIN.len() - 20, size));
    assert!(!check.is_read());
    assert_eq!(check.request(BodyFraming::Length(0)), None);
}

#[test]
fn one_head_may_be_read_behind_the_request_in_progress() {
    let begun = |fields: &str| {
        let mut check = HeadCheck::default();
        assert_eq!(check.read_max(), CONNECTION_HEAD_BYTES);
        let head = format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        assert_eq!(check.read(head.as_bytes()), None);
        check
    };
    assert_eq!(begun("").read_max(), CONNECTION_HEAD_BYTES);
    let with_length = begun("Content-Length: 100000\r\n");
    assert_eq!(with_length.read_max(), 100_000 + CONNECTION_HEAD_BYTES);
    let mut chunked = begun("Transfer-Encoding: chunked\r\n");
    for (data, of_chunk) in [("", 0), ("186a0\r\n", 100_000), ("x", 99_999)] {
        assert_eq!(chunked.read(data.as_bytes()), None);
        let read_max = of_chunk + CONNECTION_HEAD_BYTES;
        assert_eq!(chunked.read_max(), read_max, "{data:?}");
    }
    let mut malformed = begun("Transfer-Encoding: chunked\r\n");
    assert_eq!(malformed.read(b"x"), None);
    assert_eq!(malformed.read_max(), CONNECTION_HEAD_BYTES);
    assert_eq!(chunked.request(BodyFraming::Opaque), None);
    assert_eq!(chunked.read_max(), usize::MAX);
}

/// Heads that hyper cannot parse are far shorter than others.
#[test]
fn heads_behind_the_request_in_progress_take_no_more_memory_than_one_head() {
    let mut check = HeadCheck::default();
    let unlike = "x\n\nx\r\n\r\n";
    let behind = unlike.repeat(CONNECTION_HEAD_BYTES / unlike.len());
    assert_eq!(check.read(behind.as_bytes()), None);
    let bytes = check.heads.capacity() * size_of::<HeadRun>();
    assert!(bytes <= CONNECTION_HEAD_BYTES, "{bytes}");
}

#[test]
fn body_goes_on_until_its_end_has_arrived() {
    let length = PLAIN.replace("\r\n\r\n", "\r\nContent-Length: 2\r\n\r\n");
    let chunked = PLAIN.replace("\r\n\r\n", "\r\nTransfer-Encoding: chunked\r\n\r\n");
    for (input, expected) in [
        ("GET /".to_owned(), false),
        (PLAIN.to_owned(), false),
        (length.clone(), true),
        (format!("{length}a"), true),
        (format!("{length}ab"), false),
        (format!("{chunked}1\r\na\r\n"), true),
        (format!("{chunked}1\r\na\r\n0\r\n\r\n"), false),
        (format!("{chunked}malformed"), true),
    ] {
        let mut check = HeadCheck::default();
        check.read(input.as_bytes());
        assert_eq!(check.is_within_body(), expected, "{input:?}");
    }
}
