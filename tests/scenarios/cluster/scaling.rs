//! The Deployment of `install.yaml` is scaled under load. The test plays the controllers: it starts
//! the servers with the arguments and the environment of the manifest, each on an address of its
//! own in the place of the Pod's, and sends callers and agents to them by one virtual address.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tunnel_tests::ca::TestCa;
use tunnel_tests::client::{BodyEnd, Exchange, RawRequest};
use tunnel_tests::eventually::scaled;
use tunnel_tests::gear::Gear;
use tunnel_tests::manifests::{ADDRESS_PLACEHOLDER, Container, Facts, documents, find, folder};
use tunnel_tests::netns::{CLOUD_ADDRESS, in_service_namespace, service_address};
use tunnel_tests::process::{ServerSetup, Signal};
use tunnel_tests::tools::or_skip;

use super::ClusterEnv;
use super::kubectl::{Kubectl, kubectls};
use super::replicas::{AGENTS, Installation, Launch, Plan, Timing, VirtualPorts};

#[tokio::test(flavor = "multi_thread")]
async fn deployment_scaled_from_2_to_4_to_2_fails_no_request() -> Result<()> {
    let test = "cluster::scaling::deployment_scaled_from_2_to_4_to_2_fails_no_request";
    in_service_namespace(test, LIMIT, scale_up_and_down).await
}

async fn scale_up_and_down() -> Result<()> {
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    let cluster_env = ClusterEnv::fake().await?;
    let file = files.into_iter().next().context("a kubectl")?;
    let kubectl = Kubectl::new(file, cluster_env.cluster.admin_kubeconfig()?)?;
    let manifest = std::fs::read_to_string(folder().join("install.yaml"))?;
    let server = service_address(PORTS.agents).to_string();
    let manifest = manifest.replace(ADDRESS_PLACEHOLDER, &server);
    ensure!(manifest.contains(&server), "the address of the servers");
    apply(&cluster_env, &kubectl, &manifest).await?;
    // The dials of several agents can go in step with the order of the servers for minutes.
    let agents = Gear::current().pick(1, 20);
    let plan = Plan {
        servers: usize::try_from(replicas(&cluster_env).await?)?,
        agents,
        virtual_ports: Some(PORTS),
        launch: launch(&manifest)?,
        cluster_env,
    };
    let mut site = Installation::start(plan).await?;
    site.settle().await;
    let callers = site.start_callers();
    let mut following = Following::start(&site).await?;
    for replicas in [4, 2] {
        set_replicas(&site.cluster_env, replicas).await?;
        reconcile(&mut site, &mut following).await?;
    }
    site.wait_for_sessions(2 * agents as u64).await;
    for replica in &site.replicas {
        let sessions = replica.server.metric(AGENTS).await?;
        ensure!(sessions > 0, "{} has no sessions", replica.name);
    }
    following.end().await?;
    callers.end(100).await?.ensure_served()
}

/// Applies the manifest in the place of the objects that the harness creates.
async fn apply(cluster_env: &ClusterEnv, kubectl: &Kubectl, manifest: &str) -> Result<()> {
    cluster_env.cluster.allow_server(false).await?;
    for kind in ["ConfigMap", "Secret", "Lease"] {
        cluster_env.objects().delete_shipped(kind).await?;
    }
    kubectl.apply("", manifest).await.map(drop)
}

/// Returns the number of Pods that the Deployment asks for.
async fn replicas(cluster_env: &ClusterEnv) -> Result<u64> {
    let deployment = cluster_env.admin().get(DEPLOYMENT).await?;
    let replicas = deployment.context("no Deployment")?["spec"]["replicas"].as_u64();
    replicas.context("no number of replicas")
}

async fn set_replicas(cluster_env: &ClusterEnv, replicas: u64) -> Result<()> {
    let patch = json!({ "spec": { "replicas": replicas } });
    cluster_env
        .admin()
        .merge(DEPLOYMENT, &patch)
        .await
        .map(drop)
}

/// Starts and stops servers until there are as many as the Deployment asks for. Those that go are
/// the oldest ones, which have the sessions, and stop at the same time.
async fn reconcile(site: &mut Installation, following: &mut Following) -> Result<()> {
    let wanted = usize::try_from(replicas(&site.cluster_env).await?)?;
    while site.replicas.len() < wanted {
        let new = site.start_replica().await?;
        site.wait_until_ready(&new).await;
        site.replicas.push_back(new);
        site.publish_endpoints().await?;
    }
    let surplus = site.replicas.len() - wanted;
    let mut leaving: Vec<_> = site.replicas.drain(..surplus).collect();
    for replica in &mut leaving {
        replica.server.process().signal(Signal::Term)?;
    }
    tokio::time::sleep(Timing::current().proxy_lag).await;
    site.publish_endpoints().await?;
    for replica in &mut leaving {
        site.wait_for_end(replica).await?;
    }
    site.wait_for_links().await?;
    // A stream ends with the drain of a server, whose log has the reason.
    let resets = following.resets().await?;
    let is_over = leaving
        .iter()
        .any(|replica| replica.server.log().contains("drain timeout is over"));
    ensure!(is_over == (resets > 0), "{resets} streams were reset");
    ensure!(
        is_over != leaving.is_empty(),
        "no stream over these servers"
    );
    Ok(())
}

/// Returns the command lines of the Deployment's Pods.
fn launch(manifest: &str) -> Result<Launch> {
    let mut objects = documents(manifest)?;
    objects.push(json!({
        "kind": "ConfigMap", "metadata": { "name": "kube-root-ca.crt" },
        "data": { "ca.crt": TestCa::new("kubernetes")?.pem() },
    }));
    let facts = Facts {
        node: "master-1".to_owned(),
        address: Ipv4Addr::LOCALHOST.to_string(),
    };
    let deployment = find(&objects, "Deployment", "tunnel-server")?;
    let container = Container::of(deployment, &objects, &facts)?;
    let launch = move |cluster_env: &ClusterEnv, number: usize, name: &str| {
        pod(cluster_env, &container, &objects, number, name)
    };
    Ok(Box::new(launch))
}

/// Returns the command line of one Pod. The API server's address and the defaults of a container
/// that would listen on all addresses are added.
fn pod(
    cluster_env: &ClusterEnv,
    container: &Container,
    objects: &[Value],
    number: usize,
    name: &str,
) -> Result<ServerSetup> {
    let root = cluster_env.scratch.path().join(format!("pod-{name}"));
    let [a, b, c, _] = CLOUD_ADDRESS.octets();
    let ip = Ipv4Addr::new(a, b, c, u8::try_from(FIRST_POD + number)?);
    let mut arguments = container.laid_out(&root, objects, "unused")?;
    // The harness adds these two.
    for word in ["run", "--log-format=json"] {
        let at = arguments.iter().position(|argument| argument == word);
        arguments.remove(at.with_context(|| format!("no {word} in {arguments:?}"))?);
    }
    for argument in &mut arguments {
        *argument = argument.replace("[::]", &ip.to_string());
    }
    if Gear::current() == Gear::Quick {
        let timing = Timing::current();
        arguments.retain(|argument| !argument.starts_with("--drain-timeout="));
        arguments.push(format!(
            "--drain-timeout={}s",
            timing.drain_timeout.as_secs()
        ));
        arguments.push(format!("--drain-delay={}s", timing.drain_delay.as_secs()));
    }
    for (flag, port) in [
        ("agent-listen", 10262),
        ("https-listen", 10263),
        ("peer-listen", 10269),
    ] {
        arguments.push(format!("--{flag}={ip}:{port}"));
    }
    let kubeconfig = cluster_env.cluster.server_kubeconfig()?;
    arguments.push(format!("--kubeconfig={}", kubeconfig.display()));
    arguments.push("--namespace=kube-system".to_owned());
    // Only containers of a cluster may serve callers without authentication.
    arguments.push("--allow-unauthenticated".to_owned());
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    let data_dir = cluster_env.scratch.path().join(name);
    let setup = ServerSetup::plain(&data_dir, None).args(&words);
    let environment = container.env.iter();
    Ok(environment.fold(setup, |setup, (name, value)| setup.env(name, value)))
}

/// Streams that callers follow until they end.
struct Following {
    stop: CancellationToken,
    streams: JoinSet<Result<Option<BodyEnd>>>,
}

impl Following {
    /// Opens streams over the virtual address, to all nodes in turn.
    async fn start(site: &Installation) -> Result<Self> {
        let (stop, mut streams) = (CancellationToken::new(), JoinSet::new());
        let port = site.kubelet.addr().port();
        for node in site.nodes.iter().cycle().take(STREAMS) {
            let follow = RawRequest::get(&format!("{node}:{port}"), "/follow?interval_ms=100");
            let stream = Exchange::start(service_address(PORTS.http), &follow).await?;
            ensure!(stream.status() == 200, "{}", stream.status());
            streams.spawn(read_lines(stream, stop.clone()));
        }
        Ok(Self { stop, streams })
    }

    /// Returns the number of streams that were reset since the last call. Another end is an error.
    async fn resets(&mut self) -> Result<usize> {
        let mut resets = 0;
        while let Ok(Some(ended)) = timeout(QUIET, self.streams.join_next()).await {
            let ended = ended??;
            ensure!(matches!(ended, Some(BodyEnd::Reset(_))), "{ended:?}");
            resets += 1;
        }
        Ok(resets)
    }

    /// Ends the streams, all of which must go on until then.
    async fn end(mut self) -> Result<()> {
        self.stop.cancel();
        while let Some(ended) = self.streams.join_next().await {
            let ended = ended??;
            ensure!(ended.is_none(), "{ended:?}");
        }
        Ok(())
    }
}

/// Reads lines until `stop`, or until the stream ends, and returns how it ended.
async fn read_lines(mut stream: Exchange, stop: CancellationToken) -> Result<Option<BodyEnd>> {
    loop {
        let line = tokio::select! {
            () = stop.cancelled() => return Ok(None),
            line = timeout(scaled(SILENCE), stream.line()) => line.context("no line")?,
        };
        if line.is_none() {
            return Ok(stream.ended().cloned());
        }
    }
}

const DEPLOYMENT: &str = "/apis/apps/v1/namespaces/kube-system/deployments/tunnel-server";
/// The ports of the Services in the manifest.
const PORTS: VirtualPorts = VirtualPorts {
    http: 10255,
    agents: 31008,
};
/// Last number of the first Pod's address.
const FIRST_POD: usize = 11;
/// Number of followed streams. One of them at least is over a server that goes.
const STREAMS: usize = 12;
/// Longest time without a line of a stream that goes on.
const SILENCE: Duration = Duration::from_secs(3);
/// Time in which the end of a stream was received.
const QUIET: Duration = Duration::from_millis(500);
/// Time limit of the test in its namespace.
const LIMIT: Duration = Duration::from_secs(1200);
