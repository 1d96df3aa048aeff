//! A parser of HTTP/1.1 requests that accepts exactly the syntax of RFC 9112. Tests use it to
//! verify the requests that reach a target.
//!
//! The parser shares no code with the tunnel or with hyper, so that a mistake there is not repeated
//! here.

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StrictRequest {
    pub method: String,
    /// Request target in origin form.
    pub target: String,
    /// Fields in the received order and spelling.
    pub fields: Vec<(String, String)>,
    /// Body without its framing.
    pub body: Vec<u8>,
    /// Trailer fields after the last chunk.
    pub trailers: Vec<(String, String)>,
}

/// The result of parsing the bytes so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parsed {
    /// A complete request, and how many bytes it took.
    Whole(Box<StrictRequest>, usize),
    /// The beginning of a request.
    Partial,
}

impl StrictRequest {
    /// Returns the value of a field that occurs once; names are compared case-insensitively.
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut values = self
            .fields
            .iter()
            .filter(|(key, _)| key.eq_ignore_ascii_case(name));
        let value = values.next().map(|(_, value)| value.as_str());
        value.filter(|_| values.next().is_none())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Parses the request at the start of `bytes`.
///
/// # Errors
/// Returns a description of the error as soon as it is certain.
pub fn parse(bytes: &[u8]) -> Result<Parsed, String> {
    let mut input = Input { bytes, at: 0 };
    match request(&mut input) {
        Ok(request) => Ok(Parsed::Whole(Box::new(request), input.at)),
        Err(ParseError::Partial) => Ok(Parsed::Partial),
        Err(ParseError::Fault(fault)) => Err(fault),
    }
}

/// The reason why there is no request.
enum ParseError {
    Partial,
    Fault(String),
}

struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    /// Reads a line that ends in CR LF. CR and LF may occur nowhere else.
    fn line(&mut self) -> Result<&'a [u8], ParseError> {
        let input = self.bytes.get(self.at..).unwrap_or_default();
        let Some(end) = input.iter().position(|byte| matches!(byte, b'\r' | b'\n')) else {
            return Err(ParseError::Partial);
        };
        let (line, end_of_line) = input.split_at(end);
        match end_of_line {
            [b'\r', b'\n', ..] => {
                self.at += end + 2;
                Ok(line)
            }
            [b'\r'] => Err(ParseError::Partial),
            _ => fault(format!("bare CR or LF behind {:?}", text(line))),
        }
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], ParseError> {
        let end = self.at.checked_add(n).ok_or(ParseError::Partial)?;
        let taken = self.bytes.get(self.at..end).ok_or(ParseError::Partial)?;
        self.at = end;
        Ok(taken)
    }
}

/// Parses a request (RFC 9112, section 2.1).
fn request(input: &mut Input<'_>) -> Result<StrictRequest, ParseError> {
    let (method, target) = request_line(input.line()?)?;
    let fields = field_lines(input)?;
    let values = |name: &str| -> Vec<&str> {
        let named = fields
            .iter()
            .filter(|(key, _)| key.eq_ignore_ascii_case(name));
        named.map(|(_, value)| value.as_str()).collect()
    };
    // One Host field is required (RFC 9112, section 3.2).
    if values("host").len() != 1 {
        return fault(format!("{} Host fields", values("host").len()));
    }
    let (body, trailers) = match (
        values("content-length").as_slice(),
        values("transfer-encoding").as_slice(),
    ) {
        ([], []) => (Vec::new(), Vec::new()),
        ([length], []) => (input.take(content_length(length)?)?.to_vec(), Vec::new()),
        ([], [coding]) if coding.eq_ignore_ascii_case("chunked") => chunked(input)?,
        (lengths, codings) => {
            return fault(format!(
                "framed by Content-Length {lengths:?} and Transfer-Encoding {codings:?}"
            ));
        }
    };
    Ok(StrictRequest {
        method,
        target,
        fields,
        body,
        trailers,
    })
}

/// Parses the request line (RFC 9112, section 3): single spaces, origin form (3.2.1), HTTP/1.1.
fn request_line(line: &[u8]) -> Result<(String, String), ParseError> {
    let tokens: Vec<_> = line.split(|byte| *byte == b' ').collect();
    let [method, target, b"HTTP/1.1"] = tokens.as_slice() else {
        return fault(format!("request line {:?}", text(line)));
    };
    if !is_token(method) {
        return fault(format!("method {:?}", text(method)));
    }
    if target.first() != Some(&b'/') || !target.iter().all(u8::is_ascii_graphic) {
        return fault(format!("request target {:?}", text(target)));
    }
    Ok((text(method), text(target)))
}

/// Parses field lines up to the empty line (RFC 9112, section 5).
fn field_lines(input: &mut Input<'_>) -> Result<Vec<(String, String)>, ParseError> {
    let mut fields = Vec::new();
    loop {
        let line = input.line()?;
        if line.is_empty() {
            return Ok(fields);
        }
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            return fault(format!("field without a colon: {:?}", text(line)));
        };
        let (name, value) = line.split_at(colon);
        let value = value.get(1..).unwrap_or_default().trim_ascii();
        // A name with a leading space would be a folded line. A name with a trailing space would be
        // a smuggled one.
        if !is_token(name) {
            return fault(format!("field name {:?}", text(name)));
        }
        if !value
            .iter()
            .all(|byte| matches!(byte, b'\t' | b' '..=b'~' | 0x80..))
        {
            return fault(format!("value of {}: {:?}", text(name), text(value)));
        }
        fields.push((text(name), text(value)));
    }
}

/// Parses a Content-Length (RFC 9110, section 8.6): digits, nothing else.
fn content_length(value: &str) -> Result<usize, ParseError> {
    let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    match value.parse() {
        Ok(length) if digits => Ok(length),
        _ => fault(format!("Content-Length {value:?}")),
    }
}

type Body = (Vec<u8>, Vec<(String, String)>);

/// Parses a chunked body (RFC 9112, section 7.1).
fn chunked(input: &mut Input<'_>) -> Result<Body, ParseError> {
    let mut body = Vec::new();
    loop {
        let line = input.line()?;
        let size = line.split(|byte| *byte == b';').next().unwrap_or_default();
        let hex = !size.is_empty() && size.iter().all(u8::is_ascii_hexdigit);
        let size = match usize::from_str_radix(&text(size), 16) {
            Ok(size) if hex => size,
            _ => return fault(format!("chunk size {:?}", text(line))),
        };
        if size == 0 {
            return Ok((body, field_lines(input)?));
        }
        body.extend_from_slice(input.take(size)?);
        if input.take(2)? != b"\r\n" {
            return fault("chunk is longer than its size".to_owned());
        }
    }
}

/// Returns whether the bytes are a token (RFC 9110, section 5.6.2).
fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty()
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn fault<T>(fault: String) -> Result<T, ParseError> {
    Err(ParseError::Fault(fault))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNKED: &[u8] = b"POST /a?b HTTP/1.1\r\nHost: h:1\r\nTransfer-Encoding: chunked\r\n\r\n\
        3;x=y\r\nabc\r\n0\r\nX-End: 1\r\n\r\n";

    fn whole(bytes: &[u8]) -> (StrictRequest, usize) {
        match parse(bytes) {
            Ok(Parsed::Whole(request, taken)) => (*request, taken),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn takes_one_request_and_leaves_the_rest() {
        let bytes = [CHUNKED, b"GET / HT"].concat();
        let (request, taken) = whole(&bytes);
        assert_eq!(
            (request.method.as_str(), request.target.as_str()),
            ("POST", "/a?b")
        );
        assert_eq!((request.text().as_str(), taken), ("abc", CHUNKED.len()));
        assert_eq!(request.trailers, [("X-End".to_owned(), "1".to_owned())]);
        assert_eq!(request.field("HOST"), Some("h:1"));
        assert_eq!(parse(b"GET / HT"), Ok(Parsed::Partial));
    }

    #[test]
    fn every_beginning_is_partial() {
        for end in 0..CHUNKED.len() {
            assert_eq!(parse(&CHUNKED[..end]), Ok(Parsed::Partial), "{end}");
        }
    }

    #[test]
    fn refuses_what_the_rfc_refuses() {
        let head = "GET / HTTP/1.1\r\nHost: h\r\n";
        for wrong in [
            "GET / HTTP/1.0\r\nHost: h\r\n\r\n",
            "GET  / HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET http://h/ HTTP/1.1\r\nHost: h\r\n\r\n",
            "G(T / HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET / HTTP/1.1\nHost: h\r\n\r\n",
            "GET / HTTP/1.1\r\n\r\n",
            &format!("{head}Host: h\r\n\r\n"),
            &format!("{head}A : b\r\n\r\n"),
            &format!("{head}A: b\r\n c\r\n\r\n"),
            &format!("{head}A: b\rc\r\n\r\n"),
            &format!("{head}A: b\0c\r\n\r\n"),
            &format!("{head}no colon\r\n\r\n"),
            &format!("{head}Content-Length: +1\r\n\r\na"),
            &format!("{head}Content-Length: 1\r\nContent-Length: 1\r\n\r\na"),
            &format!("{head}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            &format!("{head}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
            &format!("{head}Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n"),
            &format!("{head}Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n"),
        ] {
            assert!(parse(wrong.as_bytes()).is_err(), "{wrong:?}");
        }
    }
}
