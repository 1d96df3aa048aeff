//! The credentials of the client for the API server, which are followed while the server runs: a
//! kubeconfig with the files that it names, or the CA of the ServiceAccount. The client library
//! reads token files again by itself.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http::uri::InvalidUri;
use http::{HeaderValue, Request, Response, Uri};
use hyper_util::client::proxy::matcher::Matcher;
use kube::client::{Body, ClientBuilder};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use serde_json::Value;
use tokio::runtime::Handle;
use tower::layer::layer_fn;
use tower::service_fn;
use tower::util::MapResponseLayer;
use tunnel_process::file_watch::{FileWatcher, Loaded, ReloadOutcome};
use tunnel_process::settings::ConfigError;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::identity::sha256;

use super::clock::ApiServerClock;
use super::conditions::{Condition, Conditions};
use super::failure::Throttle;
use super::head_limit::{CONNECT_LIMIT, HeadLimit, READ_LIMIT};
use crate::config::KubernetesSettings;

/// A client whose credentials can be replaced. Clones of [`FollowingClient::client`] use the newest
/// ones for each request.
pub(super) struct FollowingClient {
    pub(super) client: Client,
    /// Namespace of the ServiceAccount, or `kube-system`.
    pub(super) default_namespace: String,
    pub(super) throttle: Throttle,
    pub(super) clock: ApiServerClock,
    current: Arc<ArcSwap<Client>>,
    digest: [u8; 32],
}

impl FollowingClient {
    /// Reads the credentials. Sends no request.
    pub(super) async fn open(settings: &KubernetesSettings) -> Result<Self, ConfigError> {
        let Loaded { digest, value } = load(settings.kubeconfig.as_deref()).await?;
        let default_namespace = value.default_namespace.clone();
        let (throttle, clock) = (Throttle::default(), ApiServerClock::default());
        let current = Arc::new(ArcSwap::from_pointee(build(value, &throttle, &clock)?));
        let newest = current.clone();
        let send = move |request: Request<Body>| {
            let client = newest.load_full();
            async move { client.send(request).await }
        };
        Ok(Self {
            client: Client::new(service_fn(send), default_namespace.clone()),
            default_namespace,
            throttle,
            clock,
            current,
            digest,
        })
    }

    /// Reads the credentials again every `interval` and on SIGHUP until `shutdown` stops.
    pub(super) fn follow(
        self,
        settings: &KubernetesSettings,
        interval: Duration,
        conditions: Conditions,
        shutdown: &Shutdown,
    ) {
        let watcher = FileWatcher {
            what: "kubeconfig",
            interval,
            reload_signal: shutdown.reloads(),
            digest: self.digest,
        };
        let (kubeconfig, runtime) = (settings.kubeconfig.clone(), Handle::current());
        let load = move || runtime.block_on(load(kubeconfig.as_deref()));
        let Self {
            throttle,
            clock,
            current,
            ..
        } = self;
        let apply = move |config| {
            current.store(Arc::new(build(config, &throttle, &clock)?));
            Ok::<_, ConfigError>(())
        };
        let on_reload = move |outcome: ReloadOutcome<'_>| {
            if let Some(is_unusable) = outcome.is_unusable() {
                let line = is_unusable.then(|| UNUSABLE.to_owned());
                conditions.set(Condition::Credentials, line.into_iter().collect());
            }
        };
        shutdown.spawn_service(watcher.run(load, apply, on_reload));
    }
}

/// Reads the configuration of the client, with a digest of everything that is not read again by the
/// client library.
async fn load(kubeconfig: Option<&Path>) -> Result<Loaded<Config>, ConfigError> {
    let mut content = Vec::new();
    let mut config = match kubeconfig {
        Some(path) => {
            let refuse = |error: &dyn std::fmt::Display| {
                ConfigError::mistake(format!("--kubeconfig: {}: {error}", path.display()))
            };
            content = std::fs::read(path).map_err(|error| {
                ConfigError::fact(format!("--kubeconfig: {}: {error}", path.display()))
            })?;
            let file = Kubeconfig::read_from(path).map_err(|error| refuse(&error))?;
            let file = with_plain_tokens(&file).map_err(|error| refuse(&error))?;
            let own_proxy = proxy_of(&file);
            let current = KubeConfigOptions::default();
            let loading = Config::from_custom_kubeconfig(file, &current);
            let mut config = loading.await.map_err(|error| refuse(&error))?;
            // kube compares NO_PROXY with the host of the proxy in place of the API server's.
            let proxy = proxy(own_proxy, &config.cluster_url, |name| {
                std::env::var(name).ok()
            });
            config.proxy_url = proxy.map_err(|error| refuse(&error))?;
            // The namespace of the context is a preference of its user, not the namespace of these
            // objects.
            config.default_namespace = NAMESPACE.into();
            config
        }
        None => Config::incluster().map_err(|error| {
            ConfigError::fact(format!(
                "--kubernetes: the ServiceAccount of this container: {error}"
            ))
        })?,
    };
    if config.auth_info.exec.is_some() || config.auth_info.auth_provider.is_some() {
        return Err(ConfigError::mistake(
            "--kubeconfig: its user gets credentials from another program (exec, auth-provider), and this server starts none; \
             give it a token, a token file or a client certificate",
        ));
    }
    if !has_plain_token(&config.auth_info) {
        return Err(ConfigError::mistake(
            "--kubeconfig: the token of its user has a line end or another character that no header may have; \
             copy the token again, in one line",
        ));
    }
    content.extend(config.root_cert.iter().flatten().flatten());
    let user = &config.auth_info;
    for path in [&user.client_certificate, &user.client_key] {
        // A file that is missing is reported by the client.
        content.extend(
            path.iter()
                .filter_map(|path| std::fs::read(path).ok())
                .flatten(),
        );
    }
    config.connect_timeout = Some(CONNECT_LIMIT);
    config.read_timeout = Some(READ_LIMIT);
    config.reset_reader_on_write = true;
    // Callers decide about retries, because they know what changed in the meantime.
    config.default_retry = false;
    Ok(Loaded {
        digest: sha256(&content),
        value: config,
    })
}

/// Reads a kubeconfig as the client does at the start. The outer error is that of the file system.
/// Blocks the thread.
pub(crate) fn check_kubeconfig(path: &Path) -> io::Result<Result<(), KubeconfigError>> {
    std::fs::read(path)?;
    Ok(Kubeconfig::read_from(path).map(|_file| ()))
}

/// Returns a kubeconfig whose tokens have no blanks and line ends around them, as a token has that was
/// copied from a file or is a block of YAML.
fn with_plain_tokens(file: &Kubeconfig) -> Result<Kubeconfig, serde_json::Error> {
    let mut value = serde_json::to_value(file)?;
    let users = value.get_mut("users").and_then(Value::as_array_mut);
    for user in users.into_iter().flatten() {
        if let Some(Value::String(token)) = user.get_mut("user").and_then(|it| it.get_mut("token"))
        {
            *token = token.trim().to_owned();
        }
    }
    serde_json::from_value(value)
}

/// Returns whether a header may have the token of a user, if there is one. The client library panics
/// on another token.
fn has_plain_token(user: &AuthInfo) -> bool {
    let user = serde_json::to_value(user).unwrap_or_default();
    let token = user.get("token").and_then(Value::as_str);
    token.is_none_or(|token| HeaderValue::from_str(token).is_ok())
}

/// Returns `proxy-url` of the current context's cluster.
fn proxy_of(file: &Kubeconfig) -> Option<String> {
    let current = file.current_context.as_ref()?;
    let mut contexts = file.contexts.iter();
    let context = contexts.find(|context| context.name == *current)?;
    let name = &context.context.as_ref()?.cluster;
    let mut clusters = file.clusters.iter();
    let cluster = clusters.find(|cluster| cluster.name == *name)?;
    cluster.cluster.as_ref()?.proxy_url.clone()
}

/// Returns the proxy to the API server: `own`, that of the kubeconfig, or that of the environment
/// unless NO_PROXY names the API server.
fn proxy(
    own: Option<String>,
    api_server: &Uri,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<Uri>, InvalidUri> {
    let set = |upper: &str, lower: &str| {
        let value = variable(upper).filter(|value| !value.is_empty());
        value.or_else(|| variable(lower))
    };
    let with_scheme = |url: String| match url.contains("://") {
        true => url,
        false => format!("http://{url}"),
    };
    let of_environment = || {
        let url = with_scheme(set("HTTPS_PROXY", "https_proxy")?);
        let exceptions = set("NO_PROXY", "no_proxy").unwrap_or_default();
        // The matcher decides about the exceptions alone: a proxy that it does not know is an error.
        let matcher = Matcher::builder()
            .all("http://proxy")
            .no(exceptions)
            .build();
        matcher.intercept(api_server).map(|_proxy| url)
    };
    let own = own.filter(|url| !url.is_empty()).map(with_scheme);
    match own.or_else(of_environment) {
        Some(url) => url.parse().map(Some),
        None => Ok(None),
    }
}

fn build(
    config: Config,
    throttle: &Throttle,
    clock: &ApiServerClock,
) -> Result<Client, ConfigError> {
    let (throttle, clock) = (throttle.clone(), clock.clone());
    let builder = ClientBuilder::try_from(config)
        .map_err(|error| ConfigError::mistake(format!("--kubeconfig: {error}")))?;
    Ok(builder
        .with_layer(&layer_fn(HeadLimit))
        .with_layer(&MapResponseLayer::new(move |response: Response<_>| {
            throttle.observe(response.status(), response.headers());
            clock.observe(response.headers());
            response
        }))
        .build())
}

/// Default namespace outside a cluster.
const NAMESPACE: &str = "kube-system";
const UNUSABLE: &str = "the changed kubeconfig, or a file that it names, cannot be used; the log has the reason, and the last \
                        good content stays in use";

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::path::PathBuf;

    use parking_lot::Mutex;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tunnel_process::meta::Readiness;

    use super::*;
    use crate::config::{Config as ServerConfig, Environment, RawConfig};
    use crate::testing::eventually;
    use tunnel_store::data_dir::testing::Scratch;

    #[test]
    fn proxy_is_used_for_hosts_that_no_proxy_does_not_name() {
        let https = ("HTTPS_PROXY", "http://u:p@10.0.0.5:3128");
        let proxied = Some("http://u:p@10.0.0.5:3128/");
        for (own, variables, expected) in [
            (None, vec![], None),
            (None, vec![https], proxied),
            (None, vec![https, ("NO_PROXY", "10.1.0.0/16")], None),
            (None, vec![https, ("no_proxy", "localhost, 10.1.2.3")], None),
            // The proxy's own address is no exception.
            (None, vec![https, ("NO_PROXY", "10.0.0.0/24")], proxied),
            (None, vec![("https_proxy", "a:1")], Some("http://a:1/")),
            (
                None,
                vec![("HTTPS_PROXY", ""), ("https_proxy", "a:1")],
                Some("http://a:1/"),
            ),
            (
                Some("http://b:2"),
                vec![https, ("NO_PROXY", "*")],
                Some("http://b:2/"),
            ),
        ] {
            let variable = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            let api_server = Uri::from_static("https://10.1.2.3:6443");
            let found = proxy(own.map(str::to_owned), &api_server, variable).unwrap();
            let found = found.map(|url| url.to_string());
            assert_eq!(found.as_deref(), expected, "{own:?} {variables:?}");
        }
    }

    #[tokio::test]
    async fn token_with_a_line_end_is_taken_and_programs_and_broken_files_are_named() {
        let (scratch, shutdown) = (Scratch::new(), Shutdown::new());
        let server = ApiServer::start(&shutdown).await;
        let path = scratch.0.path().join("kubeconfig");
        let open = async |text: &str| {
            std::fs::write(&path, text).unwrap();
            FollowingClient::open(&settings(path.clone())).await
        };
        let client = open(&server.kubeconfig("\" first\\r\\n\"")).await.unwrap();
        let request = Request::get("/version").body(Body::empty()).unwrap();
        client.client.send(request).await.unwrap();
        let head = server.last.lock().to_lowercase();
        assert!(head.contains("authorization: bearer first\r\n"), "{head}");
        let program = "{apiVersion: client.authentication.k8s.io/v1, command: aws}";
        let exec = server.kubeconfig(&format!("x, exec: {program}"));
        for (text, expected) in [
            (exec.as_str(), "from another program"),
            (&server.kubeconfig("\"a\\nb\""), "kubeconfig"),
            ("no kubeconfig", "kubeconfig"),
        ] {
            let error = open(text).await.err().unwrap().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        shutdown.finish().await;
    }

    /// An API server that answers one request on each connection with `{}`.
    #[derive(Debug)]
    struct ApiServer {
        address: SocketAddr,
        /// The head of the last request.
        last: Arc<Mutex<String>>,
    }

    impl ApiServer {
        async fn start(shutdown: &Shutdown) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let last = Arc::<Mutex<String>>::default();
            let received = last.clone();
            shutdown.spawn_service(async move {
                loop {
                    let (mut socket, _) = listener.accept().await.unwrap();
                    let mut head = vec![0; 4096];
                    let length = socket.read(&mut head).await.unwrap();
                    *received.lock() = String::from_utf8_lossy(&head[..length]).into_owned();
                    socket.write_all(ANSWER.as_bytes()).await.unwrap();
                }
            });
            Self { address, last }
        }

        fn kubeconfig(&self, token: &str) -> String {
            format!(
                "{{apiVersion: v1, kind: Config, current-context: c, clusters: [{{name: c, cluster: {{server: \"http://{}\"}}}}], \
                 users: [{{name: u, user: {{token: {token}}}}}], contexts: [{{name: c, context: {{cluster: c, user: u}}}}]}}",
                self.address
            )
        }
    }

    fn settings(kubeconfig: PathBuf) -> KubernetesSettings {
        let environment = Environment { in_cluster: true };
        let config = ServerConfig::check(&RawConfig::default(), environment).unwrap();
        KubernetesSettings {
            kubeconfig: Some(kubeconfig),
            ..config.kubernetes.unwrap()
        }
    }

    #[tokio::test]
    async fn changed_kubeconfig_is_in_use_and_a_damaged_one_is_a_condition() {
        let (scratch, shutdown) = (Scratch::new(), Shutdown::new());
        let server = ApiServer::start(&shutdown).await;
        let path = scratch.0.path().join("kubeconfig");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        write(&server.kubeconfig("first"));
        let settings = settings(path.clone());
        let following = FollowingClient::open(&settings).await.unwrap();
        let client = following.client.clone();
        let (readiness, hour) = (Readiness::default(), Duration::from_secs(3600));
        let conditions = Conditions::new(readiness.clone());
        let current = following.current.clone();
        following.follow(&settings, hour, conditions, &shutdown);
        let sends = async |token: &str| {
            let request = Request::get("/version").body(Body::empty()).unwrap();
            client.send(request).await.unwrap();
            let head = server.last.lock().to_lowercase();
            assert!(
                head.contains(&format!("authorization: bearer {token}\r\n")),
                "{head}"
            );
        };
        sends("first").await;

        let before = current.load_full();
        write(&server.kubeconfig("second"));
        shutdown.reload();
        eventually("the other client", || {
            !Arc::ptr_eq(&before, &current.load_full())
        })
        .await;
        sends("second").await;

        write("no kubeconfig");
        shutdown.reload();
        eventually("the condition", || !readiness.conditions().is_empty()).await;
        assert_eq!(readiness.conditions()[0].0, "kubeconfig");
        sends("second").await;
        write(&server.kubeconfig("second"));
        shutdown.reload();
        eventually("no condition", || readiness.conditions().is_empty()).await;
        shutdown.finish().await;
    }

    const ANSWER: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
}
