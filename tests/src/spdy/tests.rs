use super::*;

#[test]
fn blocks_of_zlib_are_decoded_in_one_context() {
    let mut decoder = HeaderDecoder::new();
    for (compressed, fields) in GOLDEN {
        assert_eq!(decoder.decode(compressed).unwrap(), owned(fields));
    }
}

#[test]
fn encoded_blocks_name_the_dictionary_once_and_are_flushed() {
    let (mut encoder, mut decoder) = (HeaderEncoder::new(), HeaderDecoder::new());
    for (index, (_, fields)) in GOLDEN.into_iter().enumerate() {
        let compressed = encoder.encode(fields).unwrap();
        if index == 0 {
            // CMF, FLG with FDICT, and DICTID (RFC 1950, section 2.2).
            assert_eq!((compressed[0], compressed[1] & 0x20), (0x78, 0x20));
            assert_eq!(compressed[2..6], [0xe3, 0xc6, 0xa7, 0xc2]);
        }
        assert!(
            compressed.ends_with(&[0, 0, 0xff, 0xff]),
            "{compressed:02x?}"
        );
        assert_eq!(decoder.decode(&compressed).unwrap(), owned(fields));
    }
}

#[test]
fn long_blocks_are_encoded_and_decoded_whole() {
    let (mut encoder, mut decoder) = (HeaderEncoder::new(), HeaderDecoder::new());
    let value = (0..20_000)
        .map(|n| format!("{n:x}"))
        .collect::<Vec<_>>()
        .join(",");
    for name in ["first", "second"] {
        let fields = [(name, value.as_str())];
        let compressed = encoder.encode(&fields).unwrap();
        let decoded = decoder.decode(&compressed).unwrap();
        assert!(decoded == owned(&fields), "{name}");
    }
}

#[test]
fn damaged_blocks_are_errors() {
    let [(first, _), (second, _), ..] = GOLDEN;
    for damaged in [
        &b""[..],
        b"\x78",
        b"\x78\xf9\xe3\xc6\xa7\xc2",
        // Another dictionary.
        b"\x78\xf9\xe3\xc6\xa7\xc3\xa2\x02",
        &first[..12],
        second,
    ] {
        let decoded = HeaderDecoder::new().decode(damaged);
        assert!(decoded.is_err(), "{damaged:02x?}: {decoded:?}");
    }
}

#[tokio::test]
async fn frames_of_a_real_client_are_read() {
    let [(error, error_fields), (further, _), (data, data_fields), _] = GOLDEN;
    let (mut client, server) = tokio::io::duplex(4096);
    let frames = [
        // SETTINGS with the maximum of concurrent streams.
        control(4, &[0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 100]),
        syn_stream(1, error),
        // WINDOW_UPDATE
        control(9, &[0, 0, 0, 1, 0, 0, 0x10, 0]),
        headers(1, further),
        syn_stream(3, data),
        vec![0, 0, 0, 3, 1, 0, 0, 2, b'h', b'i'],
        control(3, &[0, 0, 0, 3, 0, 0, 0, 5]),
        control(7, &[0; 8]),
    ];
    client.write_all(&frames.concat()).await.unwrap();
    drop(client);
    let opened = |id: u32, fields: &[(&str, &str)]| Frame::Open {
        id,
        fields: owned(fields),
        fin: false,
    };
    let mut spdy = Spdy::server(server);
    for expected in [
        Frame::Other(4),
        opened(1, error_fields),
        Frame::Other(9),
        Frame::Other(8),
        opened(3, data_fields),
        Frame::Data {
            id: 3,
            bytes: b"hi".to_vec(),
            fin: true,
        },
        Frame::Reset(3),
        Frame::GoAway,
    ] {
        assert_eq!(spdy.next().await.unwrap(), Some(expected));
    }
    assert_eq!(spdy.next().await.unwrap(), None);
}

fn syn_stream(id: u8, block: &[u8]) -> Vec<u8> {
    let mut payload = vec![0, 0, 0, id, 0, 0, 0, 0, 0, 0];
    payload.extend_from_slice(block);
    control(1, &payload)
}

fn headers(id: u8, block: &[u8]) -> Vec<u8> {
    let mut payload = vec![0, 0, 0, id];
    payload.extend_from_slice(block);
    control(8, &payload)
}

fn control(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    let mut frame = vec![0x80, 3, 0, kind, 0, 0, 0, length];
    frame.extend_from_slice(payload);
    frame
}

fn owned(fields: &[(&str, &str)]) -> Vec<(String, String)> {
    (fields.iter())
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

/// A compressed block and its fields.
type Golden = (&'static [u8], &'static [(&'static str, &'static str)]);

/// Consecutive blocks of zlib 1.2.13 at level 9 with the dictionary, each ended by `Z_SYNC_FLUSH`.
const GOLDEN: [Golden; 4] = [
    (
        b"\x78\xf9\xe3\xc6\xa7\xc2\x02\xa6\x23\x46\x70\x3a\x2b\x29\x4a\x4d\xcc\x85\x16\x25\
            \xac\xa9\xa0\x80\x06\x00\x00\x00\xff\xff",
        &[("streamtype", "error")],
    ),
    (
        b"\xc2\x2e\x55\x5c\x02\xcc\x2e\x00\x00\x00\x00\xff\xff",
        &[("streamtype", "stdin")],
    ),
    (
        b"\x02\x25\x55\x0c\x29\x50\x01\x94\x08\x29\xcb\x8b\xc0\xd9\xc6\xc2\xc0\xc2\x00\x48\
            \x73\x16\x41\xe2\x3e\x13\x94\x27\x18\x0d\x00\x00\x00\x00\xff\xff",
        &[("streamtype", "data"), ("port", "8080"), ("requestid", "0")],
    ),
    (b"\x02\x12\x0c\x00\x00\x00\x00\xff\xff", &[]),
];
