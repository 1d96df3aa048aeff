//! Small programs that run inside a namespace, where the harness itself cannot run.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{interval, timeout};

use crate::apiserver::{FakeApiServer, Setup};
use crate::client::{ClientTls, Endpoint, Exchange, KeepAliveClient, RawRequest, UpgradeClient};
use crate::dns::{Behavior, DnsClient, FakeResolver, RecordType};
use crate::netns::Namespace;
use crate::process::{Process, Program};
use crate::targets::{Exporter, FakeKubelet};

/// Starts fake targets of `node` inside `namespace`: an exporter on the first address, a kubelet on
/// the second.
///
/// # Errors
/// Returns an error with their output if they cannot be started.
pub async fn site(
    node: &str,
    exporter: Option<SocketAddr>,
    kubelet: Option<SocketAddr>,
    namespace: Option<&Namespace>,
) -> Result<Process> {
    let mut program = Program::ours(PROGRAM)?.args(["site", node]);
    for (flag, address) in [("--exporter", exporter), ("--kubelet", kubelet)] {
        if let Some(address) = address {
            program = program.arg(flag).arg(address.to_string());
        }
    }
    let mut site = program.inside(namespace).in_own_group().start()?;
    site.wait_for_line("readiness", SITE_START, |line| {
        (line == READY).then_some(())
    })
    .await?;
    Ok(site)
}

/// Requests `path` from `address` inside `namespace` with `Host: host`. Returns head and body of
/// the answer.
///
/// # Errors
/// Returns an error if there is no answer, or if it is cut.
pub async fn get(
    namespace: Option<&Namespace>,
    address: SocketAddr,
    host: &str,
    path: &str,
) -> Result<(String, String)> {
    let program = Program::ours(PROGRAM)?.args(["get", "--head", &address.to_string(), host, path]);
    let printed = program.inside(namespace).run().await?.ok()?;
    let (head, body) = printed.split_once("\n\n").context("no end of the head")?;
    Ok((head.to_owned(), body.to_owned()))
}

/// Number of answers of each kind, by status and first line of the body: `200 # node worker-1`.
pub type Tally = BTreeMap<String, u64>;

/// Sends `count` requests for `path` with `Host: host` to `address` inside `namespace`, on a few
/// keep-alive connections.
///
/// # Errors
/// Returns an error if the program cannot be run or fails.
pub async fn tally(
    namespace: Option<&Namespace>,
    address: SocketAddr,
    host: &str,
    path: &str,
    count: u64,
) -> Result<Tally> {
    let program = Program::ours(PROGRAM)?
        .args(["tally", &address.to_string(), host, path])
        .args([count.to_string(), CONNECTIONS.to_string()]);
    let printed = program.inside(namespace).run().await?.ok()?;
    serde_json::from_str(&printed).with_context(|| format!("tally printed {printed}"))
}

/// Tries a TCP connection to `address` from inside `namespace` for a second. Returns the reason of
/// a failure.
///
/// # Errors
/// Returns an error if the program cannot be run.
pub async fn dial(
    namespace: Option<&Namespace>,
    address: SocketAddr,
) -> Result<Result<(), String>> {
    let program = Program::ours(PROGRAM)?.args(["dial", &address.to_string()]);
    let finished = program.inside(namespace).run().await?;
    Ok(if finished.status.success() {
        Ok(())
    } else {
        Err(finished.err.trim().to_owned())
    })
}

/// Starts a resolver on `address` inside `namespace` that prints `asked NAME` for each query. The
/// resolver `answers`, or is `silent`.
///
/// # Errors
/// Returns an error with its output if it cannot be started.
pub async fn resolver(
    namespace: Option<&Namespace>,
    address: SocketAddr,
    behavior: &str,
) -> Result<Process> {
    let program = Program::ours(PROGRAM)?.args(["resolver", &address.to_string(), behavior]);
    let mut resolver = program.inside(namespace).in_own_group().start()?;
    resolver
        .wait_for_line("readiness", SITE_START, |line| {
            (line == READY).then_some(())
        })
        .await?;
    Ok(resolver)
}

/// A fake API server inside a namespace, on its loopback.
#[derive(Debug)]
pub struct ApiServer {
    /// The process, which ends on drop.
    pub process: Process,
    /// Kubeconfig with all permissions.
    pub admin: PathBuf,
    /// Kubeconfigs of the ServiceAccounts in the requested order.
    pub accounts: Vec<PathBuf>,
}

/// Starts a fake API server inside `namespace`, with ServiceAccounts written `NAMESPACE/NAME`.
///
/// # Errors
/// Returns an error with its output if it cannot be started.
pub async fn api_server(namespace: Option<&Namespace>, accounts: &[&str]) -> Result<ApiServer> {
    let program = Program::ours(PROGRAM)?
        .arg("apiserver")
        .args(accounts.to_vec());
    let mut process = program.inside(namespace).in_own_group().start()?;
    let mut files = Vec::new();
    for user in std::iter::once(&ADMIN).chain(accounts) {
        let found = process.wait_for_line("kubeconfig", SITE_START, |line| {
            let file = line.strip_prefix("kubeconfig ")?;
            let (of, file) = file.split_once(' ')?;
            (of == *user).then(|| PathBuf::from(file))
        });
        files.push(found.await?);
    }
    let admin = files.remove(0);
    Ok(ApiServer {
        process,
        admin,
        accounts: files,
    })
}

/// Runs the probe program of that name.
pub(super) async fn run(name: &str, args: &[&str]) -> Result<ExitCode> {
    let args = Arguments::sort(args)?;
    match (name, args.plain.as_slice()) {
        ("site", &[node]) => serve_site(node, &args).await,
        ("get", &[address, host, path]) => print_answer(&args, address.parse()?, host, path).await,
        ("exec", &[address, host, path, text]) => {
            exec(args.endpoint(address.parse()?, host)?, host, path, text).await
        }
        ("tally", &[address, host, path, count, connections]) => {
            let request = RawRequest::new("GET", path, host);
            count_answers(
                address.parse()?,
                request,
                count.parse()?,
                connections.parse()?,
            )
            .await
        }
        ("resolver", &[address, behavior]) => serve_resolver(address.parse()?, behavior).await,
        ("dns", &[address, name]) => {
            let answer = DnsClient::new(address.parse()?)
                .ask(name, RecordType::A)
                .await?;
            print(&format!("{}", answer.metadata.response_code))?;
            answer
                .answers
                .iter()
                .try_for_each(|record| print(&record.to_string()))
        }
        ("apiserver", accounts) => serve_api(accounts).await,
        ("dial", &[address]) => {
            let address: SocketAddr = address.parse()?;
            timeout(DIAL_TIMEOUT, TcpStream::connect(address))
                .await
                .context("no answer")??;
            Ok(())
        }
        _ => bail!("{name} {:?} is unknown; see --help", args.plain),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Arguments, split into flags with their values and positional ones.
struct Arguments<'a> {
    plain: Vec<&'a str>,
    flags: BTreeMap<&'a str, &'a str>,
}

impl<'a> Arguments<'a> {
    fn sort(args: &[&'a str]) -> Result<Self> {
        let (mut plain, mut flags) = (Vec::new(), BTreeMap::new());
        let mut args = args.iter().copied();
        while let Some(arg) = args.next() {
            if arg == "--head" {
                flags.insert(arg, "");
            } else if arg.starts_with("--") {
                let value = args.next();
                flags.insert(arg, value.with_context(|| format!("{arg} wants a value"))?);
            } else {
                plain.push(arg);
            }
        }
        Ok(Self { plain, flags })
    }

    fn address(&self, flag: &str) -> Result<Option<SocketAddr>> {
        let address = self.flags.get(flag).map(|address| address.parse());
        address
            .transpose()
            .with_context(|| format!("{flag} wants an address with a port"))
    }

    /// Uses TLS if there is a CA to verify the server with, for the name in `host`.
    fn endpoint(&self, address: SocketAddr, host: &str) -> Result<Endpoint> {
        let Some(file) = self.flags.get("--ca") else {
            return Ok(Endpoint::plain(address));
        };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(Path::new(file)).context("read CA")? {
            roots
                .add(certificate.context("read CA")?)
                .context("use CA")?;
        }
        let name = host.rsplit_once(':').map_or(host, |(name, _port)| name);
        Ok(Endpoint::tls(
            address,
            ClientTls::verifying(name, roots, None)?,
        ))
    }
}

async fn serve_site(node: &str, args: &Arguments<'_>) -> Result<()> {
    let _exporter = match args.address("--exporter")? {
        Some(address) => Some(Exporter::start_on(address, node, None).await?),
        None => None,
    };
    let kubelet = match args.address("--kubelet")? {
        Some(address) => {
            let names = [node.to_owned(), address.ip().to_string()];
            let tls =
                crate::targets::TargetTls::self_signed(&names.each_ref().map(String::as_str))?;
            Some(FakeKubelet::start_on(address, node, Some(tls)).await?)
        }
        None => None,
    };
    print(READY)?;
    let mut pace = interval(LOG_PACE);
    for number in 1_u64.. {
        pace.tick().await;
        if let Some(kubelet) = &kubelet {
            kubelet.emit(&format!("{node}: line {number}"));
        }
    }
    Ok(())
}

async fn serve_resolver(address: SocketAddr, behavior: &str) -> Result<()> {
    let behavior = match behavior {
        "answers" => Behavior::Answers(1),
        "silent" => Behavior::Silent,
        other => bail!("{other} is neither answers nor silent"),
    };
    let resolver = FakeResolver::start_on(address, behavior).await?;
    print(READY)?;
    let mut reported = 0;
    let mut pace = interval(LOOK_PACE);
    loop {
        pace.tick().await;
        let asked = resolver.asked();
        for name in asked.iter().skip(reported) {
            print(&format!("asked {name}"))?;
        }
        reported = asked.len();
    }
}

async fn serve_api(accounts: &[&str]) -> Result<()> {
    let split = |account: &&str| {
        let (namespace, name) = account.split_once('/')?;
        Some((namespace.to_owned(), name.to_owned()))
    };
    let service_accounts: Option<Vec<_>> = accounts.iter().map(split).collect();
    let service_accounts = service_accounts.context("accounts are NAMESPACE/NAME")?;
    let server = FakeApiServer::start(Setup {
        service_accounts: service_accounts.clone(),
        ..Setup::default()
    })?;
    print(&format!(
        "kubeconfig {ADMIN} {}",
        server.admin_kubeconfig()?.display()
    ))?;
    for (namespace, name) in service_accounts {
        let file = server.service_account_kubeconfig(&namespace, &name)?;
        print(&format!("kubeconfig {namespace}/{name} {}", file.display()))?;
    }
    std::future::pending().await
}

async fn print_answer(
    args: &Arguments<'_>,
    address: SocketAddr,
    host: &str,
    path: &str,
) -> Result<()> {
    let lines: Option<usize> = args
        .flags
        .get("--lines")
        .map(|lines| lines.parse())
        .transpose()?;
    let mut exchange =
        Exchange::start(args.endpoint(address, host)?, &RawRequest::get(host, path)).await?;
    if args.flags.contains_key("--head") {
        print(&format!("HTTP/1.1 {}", exchange.status()))?;
        for (name, value) in exchange.headers() {
            print(&format!("{name}: {value}"))?;
        }
        print("")?;
    }
    let mut left = lines.unwrap_or_default();
    while left > 0
        && let Some(line) = exchange.line().await
    {
        print(&line)?;
        left -= 1;
    }
    while lines.is_none()
        && let Some(data) = exchange.data().await
    {
        write_out(&data)?;
    }
    if let Some(ended) = exchange.ended() {
        ensure!(ended.is_clean(), "the answer was cut: {ended:?}");
    }
    Ok(())
}

async fn exec(endpoint: Endpoint, host: &str, path: &str, text: &str) -> Result<()> {
    let upgrade = UpgradeClient::spdy(host, path).connect(endpoint).await?;
    let stream = upgrade.switched()?;
    print("101 Switching Protocols")?;
    let back = stream.talk(text.as_bytes()).await?;
    ensure!(
        back.ended.is_clean(),
        "the stream was cut: {:?}",
        back.ended
    );
    print(&String::from_utf8_lossy(&back.bytes))
}

async fn count_answers(
    address: SocketAddr,
    request: RawRequest,
    count: u64,
    connections: u64,
) -> Result<()> {
    ensure!(connections > 0, "at least one connection is needed");
    let mut clients = JoinSet::new();
    for client in 0..connections {
        let share = count / connections + u64::from(client < count % connections);
        let request = request.clone();
        clients.spawn(async move {
            let mut client = KeepAliveClient::connect(address).await?;
            let mut tally = Tally::new();
            for _ in 0..share {
                let reply = client.request(&request).await?;
                let text = reply.text();
                let kind = format!(
                    "{} {}",
                    reply.status,
                    text.lines().next().unwrap_or_default()
                );
                *tally.entry(kind).or_default() += 1;
            }
            anyhow::Ok(tally)
        });
    }
    let mut all = Tally::new();
    while let Some(one) = clients.join_next().await {
        for (kind, n) in one?? {
            *all.entry(kind).or_default() += n;
        }
    }
    print(&serde_json::to_string(&all)?)
}

fn print(line: &str) -> Result<()> {
    write_out(format!("{line}\n").as_bytes())
}

fn write_out(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .context("print")
}

/// Name of the binary that contains the probe programs.
const PROGRAM: &str = "demo";

const READY: &str = "ready";

/// Output name of the kubeconfig with all permissions.
const ADMIN: &str = "admin";

const SITE_START: Duration = Duration::from_secs(5);

/// Long enough for any answer within one machine. A firewall that drops gives none.
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);

/// Slow enough to read, fast enough not to wait for.
const LOG_PACE: Duration = Duration::from_millis(200);

/// Interval at which queries of the fake resolver are printed.
const LOOK_PACE: Duration = Duration::from_millis(20);

const CONNECTIONS: u64 = 8;
