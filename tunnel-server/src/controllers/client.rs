//! A connection to the API server: from a kubeconfig, or as the ServiceAccount of the container.

use std::time::Duration;

use http::Response;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tower::util::MapResponseLayer;
use tunnel_proto::process::settings::ConfigError;

use super::failure::Throttle;
use super::watches::WATCH_SECONDS;
use crate::config::KubernetesSettings;

/// TCP and TLS handshake.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// A connection on which nothing came for this long is dead; a watch ends before.
const READ_LIMIT: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 15);
/// Namespace outside a cluster.
const NAMESPACE: &str = "kube-system";

/// A client that has not connected yet, and where the objects are.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) client: Client,
    pub(super) throttle: Throttle,
    pub(super) namespace: String,
}

/// Prepares a client. Nothing is sent: an API server that is away is no reason not to start.
pub(super) async fn connect(settings: &KubernetesSettings) -> Result<Connection, ConfigError> {
    let mut config = match &settings.kubeconfig {
        Some(path) => {
            let refuse = |error: kube::config::KubeconfigError| {
                ConfigError(vec![format!("--kubeconfig: {}: {error}", path.display())])
            };
            let file = Kubeconfig::read_from(path).map_err(refuse)?;
            let current = KubeConfigOptions::default();
            let mut config = Config::from_custom_kubeconfig(file, &current)
                .await
                .map_err(refuse)?;
            // The context's own says where its user likes to work, not where these objects are.
            config.default_namespace = NAMESPACE.into();
            config
        }
        None => Config::incluster().map_err(|error| {
            ConfigError(vec![format!(
                "--kubernetes: the ServiceAccount of this container: {error}"
            )])
        })?,
    };
    config.connect_timeout = Some(CONNECT_LIMIT);
    config.read_timeout = Some(READ_LIMIT);
    config.reset_reader_on_write = true;
    // Tries again are decided where it is known what changed meanwhile.
    config.default_retry = false;
    let namespace = settings.namespace.as_ref();
    let namespace = namespace.unwrap_or(&config.default_namespace).clone();
    let throttle = Throttle::default();
    let noting = throttle.clone();
    let builder = ClientBuilder::try_from(config)
        .map_err(|error| ConfigError(vec![format!("--kubeconfig: {error}")]))?;
    let client = builder
        .with_layer(&MapResponseLayer::new(move |response: Response<_>| {
            noting.note(response.status(), response.headers());
            response
        }))
        .build();
    Ok(Connection {
        client,
        throttle,
        namespace,
    })
}
