//! The URL of a proxy. Errors repeat no part of it, since a typing error can turn any part into a
//! part of the password.

use std::str::FromStr;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use tunnel_proto::wire::name::Port;
use zeroize::Zeroizing;

use super::HttpProxy;
use crate::secret::Secret;

impl FromStr for HttpProxy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let rest = match text.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            Some((scheme, _)) => return Err(unsupported(scheme)),
            None => text,
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#']) {
            return Err(format!(
                "has more than a host and a port; {SHAPE}, where user and password write / ? # as %2F %3F %23"
            ));
        }
        // The last one, as in browsers: users often forget to encode an @ in a password.
        let (user, authority) = match rest.rsplit_once('@') {
            Some((user, authority)) => (Some(user), authority),
            None => (None, rest),
        };
        let (host, port) = parse_authority(authority)?;
        let authorization = user.map(basic_credentials).transpose()?;
        Ok(Self {
            host,
            port,
            authorization,
        })
    }
}

fn unsupported(scheme: &str) -> String {
    let scheme = scheme.to_ascii_lowercase();
    match KNOWN_SCHEMES.iter().find(|known| **known == scheme) {
        Some(known) => format!("{known}:// proxies are not supported, only http:// ones; {SHAPE}"),
        None => format!("is for no kind of proxy that is supported, only http:// is; {SHAPE}"),
    }
}

/// Parses the host without brackets, and the port.
fn parse_authority(authority: &str) -> Result<(String, Port), String> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest
                .split_once(']')
                .ok_or_else(|| format!("has no ] after an IPv6 address; {SHAPE}"))?;
            let is_v6 = |byte: u8| byte.is_ascii_alphanumeric() || b":.%".contains(&byte);
            if !host.contains(':') || !host.bytes().all(is_v6) {
                return Err(format!("has no IPv6 address in its brackets; {SHAPE}"));
            }
            match port.strip_prefix(':') {
                Some(port) => (host, port),
                None if port.is_empty() => (host, ""),
                None => return Err(format!("is not a host and a port; {SHAPE}")),
            }
        }
        None => {
            let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
            if port.contains(':') {
                return Err(
                    "needs brackets around an IPv6 address, as in http://[2001:db8::1]:3128"
                        .to_owned(),
                );
            }
            let known = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
            if host.is_empty() || !host.bytes().all(known) {
                return Err(format!("names no host; {SHAPE}"));
            }
            (host, port)
        }
    };
    let port = match port {
        "" => DEFAULT_PORT,
        text => text,
    };
    let port = port
        .parse()
        .map_err(|_repeats_it| format!("has a port that is not 1 to 65535; {SHAPE}"))?;
    Ok((host.to_owned(), port))
}

/// Returns Basic credentials (RFC 7617) from the part of the URL before the @.
fn basic_credentials(user: &str) -> Result<Secret, String> {
    let (user, password) = user.split_once(':').unwrap_or((user, ""));
    let mut credentials = Zeroizing::new(percent_decode(user)?);
    if credentials.contains(&b':') {
        return Err("has a colon in the user, which proxies cannot tell from its end".to_owned());
    }
    credentials.push(b':');
    credentials.extend_from_slice(&Zeroizing::new(percent_decode(password)?));
    let credentials = BASE64_STANDARD.encode(credentials.as_slice());
    Ok(Secret(format!("Basic {credentials}")))
}

/// Decodes percent-encoding (RFC 3986, section 2.1).
fn percent_decode(text: &str) -> Result<Vec<u8>, String> {
    let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
    let mut bytes = text.bytes();
    let mut plain = Vec::new();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            plain.push(byte);
            continue;
        }
        let value = digit(bytes.next())
            .zip(digit(bytes.next()))
            .and_then(|(high, low)| u8::try_from(high * 16 + low).ok())
            .ok_or("has a % in user or password that begins no %XX; write %25 for a % itself")?;
        plain.push(value);
    }
    Ok(plain)
}

const SHAPE: &str = "write http://[USER:PASSWORD@]HOST[:PORT]";
/// The scheme's default, as in Go and browsers; curl uses 1080.
const DEFAULT_PORT: &str = "80";
/// Schemes that a message may repeat.
const KNOWN_SCHEMES: &[&str] = &[
    "https", "socks", "socks4", "socks4a", "socks5", "socks5h", "quic", "ftp",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> HttpProxy {
        text.parse()
            .unwrap_or_else(|error: String| panic!("{text}: {error}"))
    }

    #[test]
    fn urls_give_an_authority_and_credentials() {
        for (url, authority, user) in [
            ("http://proxy.corp:3128", "proxy.corp:3128", None),
            ("http://proxy.corp:3128/", "proxy.corp:3128", None),
            ("HTTP://proxy.corp", "proxy.corp:80", None),
            ("http://proxy.corp:", "proxy.corp:80", None),
            ("proxy.corp:8080", "proxy.corp:8080", None),
            (" proxy_1 ", "proxy_1:80", None),
            ("10.0.0.1:1", "10.0.0.1:1", None),
            ("http://[2001:db8::1]:3128", "[2001:db8::1]:3128", None),
            ("[fe80::1%eth0]", "[fe80::1%eth0]:80", None),
            ("http://user:pass@p:3128", "p:3128", Some("user:pass")),
            ("user:pass@[::1]:3128/", "[::1]:3128", Some("user:pass")),
            ("http://user@proxy:1", "proxy:1", Some("user:")),
            ("http://u:p%40s%2fs%3A%25@p", "p:80", Some("u:p@s/s:%")),
            ("http://u:p@ss:w@proxy", "proxy:80", Some("u:p@ss:w")),
            ("http://d%5Cu:%C3%A9+@p", "p:80", Some("d\\u:\u{e9}+")),
        ] {
            let proxy = parse(url);
            assert_eq!(proxy.to_string(), authority, "{url}");
            let basic = |user| Secret(format!("Basic {}", BASE64_STANDARD.encode(user)));
            assert_eq!(proxy.authorization, user.map(basic), "{url}");
        }
    }

    #[test]
    fn wrong_urls_are_explained_without_their_secrets() {
        for (url, words) in [
            ("https://u:hunter2@proxy:443", "https:// proxies are not"),
            ("SOCKS5://hunter2@proxy", "socks5:// proxies are not"),
            ("socks5h://proxy:1080", "socks5h:// proxies are not"),
            ("hunter2://proxy", "only http:// is"),
            ("u:hunter2://x@proxy", "only http:// is"),
            ("", "names no host"),
            ("http://", "names no host"),
            ("http://:3128", "names no host"),
            ("http://u:hunter2@:3128", "names no host"),
            ("http://pro xy", "names no host"),
            ("http://pr\u{f6}xy", "names no host"),
            ("http://u:hunter2", "port that is not"),
            ("http://proxy:0", "port that is not"),
            ("http://proxy:65536", "port that is not"),
            ("http://proxy:+1", "port that is not"),
            ("http://u:hunter2/x@proxy", "%2F"),
            ("http://proxy/pac", "more than a host"),
            ("http://proxy?x", "more than a host"),
            ("http://proxy#x", "more than a host"),
            ("http://2001:db8::1", "brackets around"),
            ("http://[2001:db8::1:3128", "no ]"),
            ("http://[::1]3128", "not a host and a port"),
            ("http://[proxy]", "no IPv6 address"),
            ("http://u:hunter2%@proxy", "%25"),
            ("http://u:hunter2%4@proxy", "%25"),
            ("http://u:hunter2%+4@proxy", "%25"),
            ("http://u%3Ax:hunter2@proxy", "colon in the user"),
        ] {
            let error = url.parse::<HttpProxy>().unwrap_err();
            assert!(error.contains(words), "{url:?}: {error}");
            assert!(!error.contains("hunter2"), "{url:?}: {error}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let proxy = parse("http://user:hunter2@proxy");
        let encoded = BASE64_STANDARD.encode("user:hunter2");
        let shown = format!("{proxy:?} {proxy:#?} {proxy}");
        assert!(shown.contains("Secret(..)"), "{shown}");
        for secret in ["hunter2", &encoded, "Basic"] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}
