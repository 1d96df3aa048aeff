//! Selects the servers that are reached through a proxy, from --proxy, HTTPS_PROXY and NO_PROXY.

use std::fmt;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::net::TcpStream;
use tunnel_proto::tcp::{Connect, Direct, ServerAddr};

use super::HttpProxy;
use super::no_proxy::NoProxy;
use crate::secret::Secret;
use crate::server_address::ServerAddress;

/// The route of TCP connections to servers. The [`Connect`] implementation decides by the name of
/// the remote.
///
/// The proxy resolves the names of servers behind it, so their [`ServerAddr`] needs no address.
#[derive(Debug, Clone, Default)]
pub struct ProxyChoice(ProxyRoute);

#[derive(Debug, Clone, Default)]
enum ProxyRoute {
    #[default]
    Direct,
    /// --proxy: a proxy for every server.
    Explicit(Arc<HttpProxy>),
    /// HTTPS_PROXY: a proxy for all servers except those of NO_PROXY.
    Environment {
        proxy: Arc<HttpProxy>,
        variable: &'static str,
        direct: Arc<NoProxy>,
    },
}

/// The environment variables that many programs share, as read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvironmentProxy {
    /// Name of the variable that set the proxy, for messages.
    pub variable: &'static str,
    /// Value of that variable.
    pub url: Secret,
    pub no_proxy: String,
}

impl EnvironmentProxy {
    /// Looks up HTTPS_PROXY and NO_PROXY with `variable` and, if they are absent or empty, their
    /// lower-case names.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let first = |names: [&'static str; 2]| {
            names.into_iter().find_map(|name| {
                let value = variable(name).filter(|value| !value.trim().is_empty());
                value.map(|value| (name, value))
            })
        };
        let (variable, url) = first(["HTTPS_PROXY", "https_proxy"])?;
        let no_proxy = first(["NO_PROXY", "no_proxy"]).map(|(_, list)| list);
        Some(Self {
            variable,
            url: Secret(url),
            no_proxy: no_proxy.unwrap_or_default(),
        })
    }
}

impl ProxyChoice {
    /// Decides for `servers`. `explicit`, the value of --proxy, takes precedence over the
    /// environment. Neither `off` nor an absent value sets a proxy.
    ///
    /// # Errors
    /// Returns the setting and a message for the operator. A proxy of the environment is parsed
    /// only if a server would need it.
    pub(crate) fn decide(
        explicit: Option<&Secret>,
        environment: Option<&EnvironmentProxy>,
        servers: &[ServerAddress],
    ) -> Result<Self, (&'static str, String)> {
        if let Some(Secret(url)) = explicit {
            return match url.trim() {
                "" | OFF => Ok(Self(ProxyRoute::Direct)),
                url => match url.parse() {
                    Ok(proxy) => Ok(Self(ProxyRoute::Explicit(Arc::new(proxy)))),
                    Err(problem) => Err(("--proxy", problem)),
                },
            };
        }
        let Some(environment) = environment else {
            return Ok(Self(ProxyRoute::Direct));
        };
        let direct = NoProxy::new(&environment.no_proxy);
        if servers.iter().all(|server| direct.covers(server)) {
            return Ok(Self(ProxyRoute::Direct));
        }
        let variable = environment.variable;
        match environment.url.0.parse() {
            Ok(proxy) => Ok(Self(ProxyRoute::Environment {
                proxy: Arc::new(proxy),
                variable,
                direct: Arc::new(direct),
            })),
            Err(problem) => Err((variable, format!("{problem}; --proxy {OFF} ignores it"))),
        }
    }

    /// Returns whether --proxy names a proxy. The agent's operator did not necessarily choose a
    /// proxy of the environment.
    pub fn is_explicit(&self) -> bool {
        match self.0 {
            ProxyRoute::Explicit(_) => true,
            ProxyRoute::Direct | ProxyRoute::Environment { .. } => false,
        }
    }

    pub fn proxy_for(&self, server: &ServerAddress) -> Option<&Arc<HttpProxy>> {
        match &self.0 {
            ProxyRoute::Direct => None,
            ProxyRoute::Explicit(proxy) => Some(proxy),
            ProxyRoute::Environment { proxy, direct, .. } => {
                (!direct.covers(server)).then_some(proxy)
            }
        }
    }

    /// Returns whether TCP connections to this address are dialed through a proxy.
    pub fn is_dialed_for(&self, remote: &ServerAddr) -> bool {
        let server = remote.name.parse::<ServerAddress>();
        server.is_ok_and(|server| self.is_proxied(&server))
    }

    /// Returns whether TCP connections to `server` go through a proxy, so that its name need not be
    /// resolved here.
    pub fn is_proxied(&self, server: &ServerAddress) -> bool {
        self.proxy_for(server).is_some()
    }
}

impl fmt::Display for ProxyChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            ProxyRoute::Direct => formatter.write_str("none"),
            ProxyRoute::Explicit(proxy) => write!(formatter, "{proxy} (--proxy)"),
            ProxyRoute::Environment {
                proxy, variable, ..
            } => write!(formatter, "{proxy} ({variable})"),
        }
    }
}

// Written by hand in the form that `#[async_trait]` generates, as for HttpProxy.
#[async_trait]
impl Connect for ProxyChoice {
    async fn connect(&self, remote: &ServerAddr) -> io::Result<TcpStream> {
        let server: ServerAddress = remote
            .name
            .parse()
            .map_err(|problem: String| io::Error::new(io::ErrorKind::InvalidInput, problem))?;
        match self.proxy_for(&server) {
            Some(proxy) => proxy.connect(remote).await,
            None => Direct.connect(remote).await,
        }
    }
}

/// Value of --proxy that disables the proxy.
const OFF: &str = "off";

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(variables: &[(&str, &str)]) -> Option<EnvironmentProxy> {
        EnvironmentProxy::from_variables(|wanted| {
            let found = variables.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    fn servers(texts: &[&str]) -> Vec<ServerAddress> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn explicit_goes_before_environment_and_upper_case_before_lower() {
        let servers = servers(&["cloud.example.com:10262"]);
        let up = ("HTTPS_PROXY", "http://up:1");
        let low = ("https_proxy", "http://low:2");
        let wrong = ("HTTPS_PROXY", "socks5://x:1");
        let no_proxy = ("no_proxy", "example.com");
        let [by_up, given] = ["up:1 (HTTPS_PROXY)", "given:3 (--proxy)"];
        for (explicit, variables, expected) in [
            (None, &[][..], "none"),
            (None, &[up], by_up),
            (None, &[low], "low:2 (https_proxy)"),
            (None, &[low, up], by_up),
            (None, &[low, ("HTTPS_PROXY", " ")], "low:2 (https_proxy)"),
            (None, &[("HTTP_PROXY", "http://p:1")], "none"),
            (None, &[up, ("NO_PROXY", "example.com")], "none"),
            (None, &[up, no_proxy], "none"),
            (None, &[up, ("NO_PROXY", "x"), no_proxy], by_up),
            (None, &[up, ("NO_PROXY", ""), no_proxy], "none"),
            (Some("http://given:3"), &[], given),
            (Some("given:3"), &[up], given),
            (Some("given:3"), &[up, ("NO_PROXY", "*")], given),
            (Some("off"), &[up], "none"),
            (Some(" off "), &[up], "none"),
            (Some(""), &[up], "none"),
            (Some("off"), &[wrong], "none"),
            (None, &[wrong, ("NO_PROXY", "*")], "none"),
        ] {
            let (explicit, environment) = (explicit.map(Secret::from), environment(variables));
            let choice = ProxyChoice::decide(explicit.as_ref(), environment.as_ref(), &servers);
            let choice = choice.unwrap();
            assert_eq!(choice.to_string(), expected, "{explicit:?} {variables:?}");
            assert_eq!(choice.is_explicit(), expected.ends_with("(--proxy)"));
            assert_eq!(choice.is_proxied(&servers[0]), expected != "none");
        }
    }

    #[test]
    fn no_proxy_is_asked_per_server_and_only_for_the_environment() {
        let servers = servers(&["near.example.com:1", "far.example.org:1", "localhost:1"]);
        let variables = [
            ("HTTPS_PROXY", "http://u:hunter2@p:1"),
            ("NO_PROXY", "example.com"),
        ];
        let environment = environment(&variables);
        let proxied = |explicit: Option<&str>| {
            let explicit = explicit.map(Secret::from);
            let choice = ProxyChoice::decide(explicit.as_ref(), environment.as_ref(), &servers);
            let choice = choice.unwrap();
            assert!(!format!("{choice:?}{environment:?}").contains("hunter2"));
            let each = servers.iter().map(|server| choice.is_proxied(server));
            each.collect::<Vec<_>>()
        };
        assert_eq!(proxied(None), [false, true, false]);
        assert_eq!(proxied(Some("http://p:1")), [true, true, true]);
        assert_eq!(proxied(Some("off")), [false, false, false]);
    }

    #[test]
    fn errors_name_their_setting() {
        let servers = servers(&["cloud.example.com:10262"]);
        let explicit = Secret::from("https://u:hunter2@p:1");
        let (setting, problem) = ProxyChoice::decide(Some(&explicit), None, &servers).unwrap_err();
        assert_eq!(setting, "--proxy");
        assert!(problem.contains("only http://"), "{problem}");
        let environment = environment(&[("https_proxy", "socks5://u:hunter2@p:1")]);
        let (setting, problem) =
            ProxyChoice::decide(None, environment.as_ref(), &servers).unwrap_err();
        assert_eq!(setting, "https_proxy");
        assert!(problem.contains("--proxy off"), "{problem}");
        assert!(!problem.contains("hunter2"), "{problem}");
    }
}
