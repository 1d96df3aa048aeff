use super::*;

const PLAIN: &str = "GET / HTTP/1.1\r\nHost: worker-1:9100\r\n\r\n";

/// Returns the result of a check for a head that arrives in pieces of this size.
fn head_error(head: &str, piece: usize) -> Option<HeadError> {
    let mut check = HeadCheck::default();
    for piece in head.as_bytes().chunks(piece) {
        check.read(piece);
    }
    check.request(BodyFraming::Length(0))
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
fn next_heads_are_found_behind_bodies_of_known_length() {
    let body = "a\nb\n\nContent-Length: 1\nContent-Length: 1\r\n\r\n";
    let bad = PLAIN.replace("\r\n", "\n");
    for piece in [1, 3, 7, 64, 4096] {
        for split in [false, true] {
            let mut check = HeadCheck::default();
            let mut rest = format!("{PLAIN}{body}{PLAIN}{bad}");
            let mut faults = Vec::new();
            // hyper finds a head and determines this length for its body.
            for (length, head) in [(body.len(), PLAIN), (0, PLAIN), (0, &bad)] {
                let (now, later) = rest.split_at(if split { head.len() } else { rest.len() });
                for piece in now.as_bytes().chunks(piece) {
                    check.read(piece);
                }
                rest = later.to_owned();
                faults.push(check.request(BodyFraming::Length(length as u64)));
                if split && length > 0 {
                    let (now, later) = rest.split_at(length);
                    check.read(now.as_bytes());
                    rest = later.to_owned();
                }
            }
            let expected = [None, None, Some(HeadError::BareLf)];
            assert_eq!(faults, expected, "{piece} {split}");
        }
    }
}

#[test]
fn nothing_is_taken_for_a_head_where_its_beginning_is_unknown() {
    let bad = PLAIN.replace("\r\n", "\n");
    let asked = |following, behind: &str, idle: Option<&str>| {
        let mut check = HeadCheck::default();
        check.read(PLAIN.as_bytes());
        assert_eq!(check.request(following), None);
        check.read(behind.as_bytes());
        if let Some(last) = idle {
            check.idle(last.as_bytes());
        }
        check.read(bad.as_bytes());
        check.request(BodyFraming::Length(0))
    };
    let chunks = "5\r\nhello\r\n0\r\n\r\n";
    // Pipelined after chunks, or after the bytes of another protocol.
    assert_eq!(asked(BodyFraming::Chunked, chunks, None), None);
    assert_eq!(asked(BodyFraming::Opaque, "", None), None);
    assert_eq!(asked(BodyFraming::Opaque, "", Some("0\r\n\r\n")), None);
    // A line of text within an upload that was answered early.
    let text = asked(BodyFraming::Chunked, "6\r\nhello\n\r\n", Some("o\n\r\n"));
    assert_eq!(text, None);
    // The previous request was answered, and its last bytes are those of an end.
    let next = asked(BodyFraming::Chunked, chunks, Some("0\r\n\r\n"));
    assert_eq!(next, Some(HeadError::BareLf));
}

#[test]
fn a_request_without_a_body_makes_the_beginning_known_again() {
    let mut check = HeadCheck::default();
    check.read(PLAIN.as_bytes());
    assert_eq!(check.request(BodyFraming::Chunked), None);
    check.read(b"0\r\nX: y\r\n\r\n");
    check.idle(b"y\r\n\r\n");
    check.read(PLAIN.as_bytes());
    assert_eq!(check.request(BodyFraming::Length(0)), None);
    check.idle(b"0\r\n\r\n");
    check.read(PLAIN.replace("\r\n", "\n").as_bytes());
    let error = check.request(BodyFraming::Length(0));
    assert_eq!(error, Some(HeadError::BareLf));
}

#[test]
fn bytes_behind_a_head_are_stored_up_to_a_bound() {
    let mut check = HeadCheck::default();
    check.read(PLAIN.as_bytes());
    check.read(&vec![b'x'; PIPELINED_MAX_BYTES + 1]);
    assert!(matches!(check.state, State::Unknown(None)));
    assert_eq!(check.request(BodyFraming::Length(1)), None);
}
