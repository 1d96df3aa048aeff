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
