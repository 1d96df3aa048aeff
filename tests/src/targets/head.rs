//! Heads of HTTP/1.1 messages: a start line and the headers in the received order.

use std::io;

/// A message head, parsed leniently: the harness only inspects it, and the tunnel must be strict.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    /// The bytes exactly as received, with the empty line.
    pub(crate) raw: Vec<u8>,
    pub(crate) start_line: String,
    pub(crate) headers: Vec<(String, String)>,
}

impl Head {
    pub(crate) fn parse(raw: Vec<u8>) -> io::Result<Self> {
        let text = String::from_utf8_lossy(&raw);
        let mut lines = text.split("\r\n").take_while(|line| !line.is_empty());
        let start_line = lines.next().unwrap_or_default().to_owned();
        let headers = lines.map(parse_header).collect::<Option<Vec<_>>>();
        let Some(headers) = headers else {
            return Err(invalid(format!("header without a colon in {text:?}")));
        };
        Ok(Self {
            raw,
            start_line,
            headers,
        })
    }

    pub(crate) fn first(&self, name: &str) -> Option<&str> {
        first_value(&self.headers, name)
    }

    /// Returns whether the comma-separated list in header `name` contains `token`.
    pub(crate) fn lists(&self, name: &str, token: &str) -> bool {
        all_values(&self.headers, name)
            .flat_map(|list| list.split(','))
            .any(|listed| listed.trim().eq_ignore_ascii_case(token))
    }

    /// Returns the status of a reply head.
    pub(crate) fn status(&self) -> io::Result<u16> {
        let mut words = self.start_line.split(' ');
        let version = words.next().unwrap_or_default();
        let status = words.next().and_then(|word| word.parse().ok());
        match status {
            Some(status) if version.starts_with("HTTP/1.") => Ok(status),
            _ => Err(invalid(format!("not a status line: {:?}", self.start_line))),
        }
    }
}

/// Returns the first value of header `name`, compared case-insensitively.
pub(crate) fn first_value<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    all_values(headers, name).next()
}

/// Returns all values of header `name` in order, compared case-insensitively.
fn all_values<'a>(headers: &'a [(String, String)], name: &str) -> impl Iterator<Item = &'a str> {
    headers
        .iter()
        .filter(move |(key, _)| key.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.as_str())
}

fn parse_header(line: &str) -> Option<(String, String)> {
    let (name, value) = line.split_once(':')?;
    Some((name.to_owned(), value.trim().to_owned()))
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}
