//! A strict reader of HTTP/1.1 that accepts only the plainest form (RFC 9112), used to check the
//! output of other writers.

/// The result of parsing.
#[derive(Debug)]
pub(super) enum Parsed {
    /// A complete message and its length.
    Whole(Head, usize),
    /// The beginning of a message.
    Begun,
    /// The bytes are not a message. The value is the reason.
    Wrong(&'static str),
}

#[derive(Debug, Clone, Default)]
pub(super) struct Head {
    pub(super) method: String,
    pub(super) target: Vec<u8>,
    pub(super) status: u16,
    /// Field names and values. The names are in lower case.
    pub(super) fields: Vec<(String, String)>,
}

impl Head {
    pub(super) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let named = self.fields.iter().filter(move |(field, _)| field == name);
        named.map(|(_, value)| value.as_str())
    }
}

/// Parses a request at the beginning of `bytes`.
pub(super) fn request(bytes: &[u8]) -> Parsed {
    let Some(head) = head_of(bytes) else {
        return Parsed::Begun;
    };
    let line_end = head.windows(2).position(|two| two == b"\r\n").unwrap_or(0);
    let words: Vec<_> = head[..line_end].split(|byte| *byte == b' ').collect();
    let [method, target, b"HTTP/1.1"] = words[..] else {
        return Parsed::Wrong("request line");
    };
    if method.is_empty() || !method.iter().all(|byte| is_token(*byte)) {
        return Parsed::Wrong("method");
    }
    if target.is_empty() || target.iter().any(|byte| *byte <= b' ' || *byte == 0x7f) {
        return Parsed::Wrong("target");
    }
    let Some(fields) = fields(&head[line_end + 2..]) else {
        return Parsed::Wrong("fields");
    };
    let parsed = Head {
        method: String::from_utf8_lossy(method).into_owned(),
        target: target.to_vec(),
        status: 0,
        fields,
    };
    let body = &bytes[head.len()..];
    let coded: Vec<_> = parsed.all("transfer-encoding").collect();
    let lengths: Vec<_> = parsed.all("content-length").collect();
    let length = match (&coded[..], &lengths[..]) {
        ([], []) => Some(0),
        ([], [length]) if length.bytes().all(|byte| byte.is_ascii_digit()) => {
            match length.parse() {
                Ok(length) if length <= body.len() => Some(length),
                Ok(_) => None,
                Err(_) => return Parsed::Wrong("length"),
            }
        }
        (["chunked"], []) => match chunks(body) {
            Ok(length) => length,
            Err(why) => return Parsed::Wrong(why),
        },
        _ => return Parsed::Wrong("framing"),
    };
    match length {
        Some(length) => {
            let whole = head.len() + length;
            Parsed::Whole(parsed, whole)
        }
        None => Parsed::Begun,
    }
}

/// Parses the head of a response.
pub(super) fn answer_head(head: &[u8]) -> Option<Head> {
    let line_end = head.windows(2).position(|two| two == b"\r\n")?;
    let line = head[..line_end].strip_prefix(b"HTTP/1.")?;
    let status = std::str::from_utf8(line.get(2..5)?).ok()?.parse().ok()?;
    if line.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)) {
        return None;
    }
    Some(Head {
        status,
        fields: fields(&head[line_end + 2..])?,
        ..Head::default()
    })
}

/// Parses the head of the first response that is not interim, as leniently as lines allow.
pub(super) fn first_final(answer: &[u8]) -> Option<Head> {
    let mut rest = String::from_utf8_lossy(answer).replace('\r', "");
    loop {
        let (head, behind) = rest.trim_start_matches('\n').split_once("\n\n")?;
        let mut lines = head.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        if status == 101 || status >= 200 {
            let fields = lines.filter_map(|line| line.split_once(':'));
            let fields = fields.map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()));
            return Some(Head {
                status,
                fields: fields.collect(),
                ..Head::default()
            });
        }
        rest = behind.to_owned();
    }
}

/// Returns the bytes up to and including the first empty line.
pub(super) fn head_of(bytes: &[u8]) -> Option<&[u8]> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    Some(&bytes[..end + 4])
}

/// Parses fields up to and including their empty line.
fn fields(mut rest: &[u8]) -> Option<Vec<(String, String)>> {
    let mut fields = Vec::new();
    loop {
        let end = rest.windows(2).position(|two| two == b"\r\n")?;
        let (line, behind) = (&rest[..end], &rest[end + 2..]);
        if line.is_empty() {
            return behind.is_empty().then_some(fields);
        }
        let colon = line.iter().position(|byte| *byte == b':')?;
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        let plain = |byte: &u8| *byte == b'\t' || (*byte >= b' ' && *byte != 0x7f);
        if name.is_empty() || !name.iter().all(|byte| is_token(*byte)) || !value.iter().all(plain) {
            return None;
        }
        let name = String::from_utf8_lossy(name).to_lowercase();
        let value = String::from_utf8_lossy(value.trim_ascii()).into_owned();
        fields.push((name, value));
        rest = behind;
    }
}

/// Returns the length of a chunked body, or `None` if the body is incomplete.
fn chunks(body: &[u8]) -> Result<Option<usize>, &'static str> {
    let mut at = 0;
    loop {
        let Some(end) = body[at..].windows(2).position(|two| two == b"\r\n") else {
            return Ok(None);
        };
        let size = std::str::from_utf8(&body[at..at + end])
            .ok()
            .ok_or("chunk size")?;
        if size.is_empty() || !size.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err("chunk size");
        }
        let size = usize::from_str_radix(size, 16).ok().ok_or("chunk size")?;
        at += end + 2;
        if size == 0 {
            // Trailer fields end with an empty line, like a head.
            let Some(end) = head_of(&body[at - 2..]) else {
                return Ok(None);
            };
            let trailers = &end[2..];
            return match fields(trailers) {
                Some(_) => Ok(Some(at + trailers.len())),
                None => Err("trailers"),
            };
        }
        match body.get(at.saturating_add(size)..) {
            None | Some([] | [_]) => return Ok(None),
            Some([b'\r', b'\n', ..]) => at += size + 2,
            Some(_) => return Err("chunk end"),
        }
    }
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
