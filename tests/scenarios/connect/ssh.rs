//! P17: ssh and ansible by `tunnel-server connect` to nodes that are not directly reachable, two of
//! them with the same address.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::time::timeout;
use tunnel_process::config_report::ConfigStatus;
use tunnel_process::files;
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::fakes::edge_sites;
use tunnel_tests::guides::{blocks, page};
use tunnel_tests::netns::{EDGE_ADDRESS, NODES, Topology};
use tunnel_tests::process::{Fleet, Listener, Process, Program, ScratchDir, Server};
use tunnel_tests::ssh::{login_options, make_keys, start_sshd, wait_for_sshd};
use tunnel_tests::tools::{Tool, bin_dir, or_skip, require};

use crate::abuse::report_figure;
use crate::reload::BAD_FILES;

/// Port of each edge's sshd, in the edge's network namespace.
const PORT: &str = "22";
const GUIDE: &str = "docs/how-to/ssh-ansible.md";
/// A port that is not allowed and on which no process listens.
const FORBIDDEN: &str = "2223";
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// Two edges with an sshd each, and a server whose host may connect to them.
struct ConnectFixture {
    scratch: ScratchDir,
    /// The settings of the server.
    ports: String,
    /// The file that has them.
    file: PathBuf,
    sites: Topology,
    fleet: Fleet,
    _sshd: Vec<Process>,
}

impl ConnectFixture {
    async fn start(tools: &[Tool]) -> Result<Option<Self>> {
        let ssh = [Tool::Ssh, Tool::Sshd, Tool::SshKeygen];
        let here = require(&[&ssh, tools].concat()).and_then(|()| Topology::new());
        let Some(sites) = or_skip(here) else {
            return Ok(None);
        };
        let scratch = ScratchDir::new()?;
        make_keys(scratch.path()).await?;
        let mut sshd = Vec::new();
        for edge in sites.edges() {
            let address = EDGE_ADDRESS.into();
            match start_sshd(edge.node(), address, edge.node_name(), scratch.path()) {
                Ok(started) => sshd.push(started?),
                Err(skip) => {
                    or_skip::<()>(Err(skip));
                    return Ok(None);
                }
            }
        }
        for edge in sites.edges() {
            wait_for_sshd(edge.node(), EDGE_ADDRESS.into()).await;
        }
        // The settings of the guide as they stand.
        let settings = blocks(&page(GUIDE)?).into_iter();
        let settings = settings.map(|block| block.text);
        let mut settings = settings.filter(|text| text.starts_with("ports:"));
        let ports = settings.next().context("ports")?;
        let file = scratch.file("config.yaml", &ports)?;
        let fleet = Fleet::start(&sites, &["--config", &file.to_string_lossy()]).await?;
        Ok(Some(Self {
            scratch,
            ports,
            file,
            sites,
            fleet,
            _sshd: sshd,
        }))
    }

    fn server(&self) -> &Server {
        self.fleet.server()
    }

    /// Returns ssh's ProxyCommand in the form that an operator would write.
    fn proxy_command(&self) -> Result<String> {
        let binary = bin_dir().context("binaries")?.join("tunnel-server");
        let data_dir = self.server().data_dir();
        Ok(format!(
            "{} connect --data-dir {data_dir} %h %p",
            binary.display()
        ))
    }

    fn options(&self) -> Result<Vec<String>> {
        let mut options = login_options(self.scratch.path()).to_vec();
        options.push(format!("ProxyCommand={}", self.proxy_command()?));
        Ok(options
            .iter()
            .flat_map(|option| ["-o".to_owned(), option.clone()])
            .collect())
    }

    fn ssh(&self, node: &str, port: &str) -> Result<Program> {
        let ssh = Program::tool(Tool::Ssh)?.args(["-F", "none", "-p", port]);
        let ssh = ssh.args(self.options()?).arg(node);
        Ok(ssh.inside(Some(self.sites.cloud())))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_ssh_reaches_each_of_two_nodes_with_one_address() -> Result<()> {
    let Some(fixture) = ConnectFixture::start(&[Tool::Curl]).await? else {
        return Ok(());
    };
    for node in NODES {
        let ssh = fixture
            .ssh(node, PORT)?
            .arg("echo $CULVERT_NODE; cat; exit 7");
        let output = ssh.run_with(b"input").await?;
        ensure!(output.code() == Some(7), "{}", output.err);
        ensure!(output.out == format!("{node}\ninput"), "{:?}", output.out);
    }
    // A few megabytes arrive completely.
    let sent = vec![b'x'; 3 << 20];
    let count = fixture.ssh(NODES[0], PORT)?.arg("wc -c");
    let counted = count.run_with(&sent).await?.ok()?;
    ensure!(counted.trim() == sent.len().to_string(), "{counted}");
    // The other listeners do not open the port, and the server does not listen on it.
    let listener = fixture.server().address(Listener::Http);
    let curl = Program::tool(Tool::Curl)?.args(["-s", "-H", &format!("Host: worker-1:{PORT}")]);
    let curl = curl.arg(format!("http://{listener}/"));
    let answer = curl.inside(Some(fixture.sites.cloud())).run().await?.ok()?;
    ensure_contains(&answer, &["port 22 is not allowed on the http listener"])?;
    let log = fixture.server().log().lines();
    ensure!(
        !log.iter().any(|line| line.contains("\"proxy\"")),
        "{log:?}"
    );
    // The server refuses a forbidden port with a message, and logs the refusal.
    let refused = fixture.ssh(NODES[0], FORBIDDEN)?.arg("true").run().await?;
    refused.ensure_failed(255, &["port 2223 is not allowed"])?;
    // The process writes access records a moment after it creates them.
    eventually("both access records", WAIT_TIMEOUT, async || {
        let log = fixture.server().log().lines();
        let is_logged = |code: &str, request: &str| {
            let all = [code, request, "\"access\"", "uid:0"];
            log.iter()
                .any(|line| all.iter().all(|part| line.contains(part)))
        };
        let refused = is_logged("refused_by_policy", "CONNECT worker-1:2223");
        let opened = is_logged("\"ok\"", "CONNECT worker-2:22\"");
        ensure!(refused && opened, "{log:?}");
        Ok(())
    })
    .await;
    Ok(())
}

/// The server reads 34 files with a mistake and as many good ones, while 100 requests a second go on, half
/// of them on a connection each, and somebody is logged in.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_fails_over_reloads_under_100_requests_a_second_with_an_open_ssh_session()
-> Result<()> {
    let Some(fixture) = ConnectFixture::start(&[Tool::Curl]).await? else {
        return Ok(());
    };
    let _exporters = edge_sites(&fixture.sites).await?;
    // Each good file differs from the one before, so that the server applies it.
    let mut numbers = 3000_u32..;
    let mut good = || {
        let (ports, millis) = (&fixture.ports, numbers.next().unwrap_or(1));
        format!("{ports}httpProxyPorts: 9100\nlimits: {{ openTimeout: {millis}ms }}\n")
    };
    let reload = async |text: &str| {
        files::replace(&fixture.file, text.as_bytes())?;
        let reload = fixture.server().verb(&["reload", "-o", "json"])?;
        let finished = reload.run().await?;
        let status: ConfigStatus = serde_json::from_str(&finished.out)?;
        anyhow::Ok((finished.code(), status))
    };
    let (code, applied) = reload(&good()).await?;
    ensure!(code == Some(0), "{applied:?}");

    let remote = "while read -r line; do echo $CULVERT_NODE $line; done; exit 7";
    let mut session = fixture.ssh(NODES[0], PORT)?.arg(remote).start_piped()?;
    let mut answers = BufReader::new(&mut session.stdout).lines();
    let mut say = async |line: &str| {
        session
            .stdin
            .write_all(format!("{line}\n").as_bytes())
            .await?;
        let answer = timeout(scaled(WAIT_TIMEOUT), answers.next_line()).await??;
        let expected = format!("{} {line}", NODES[0]);
        ensure!(answer.as_ref() == Some(&expected), "{answer:?}");
        anyhow::Ok(())
    };
    say("before").await?;
    let listener = fixture.server().address(Listener::Http);
    let mut requests = Vec::new();
    for connection in ["keep-alive", "close"] {
        let curl = Program::tool(Tool::Curl)?
            .args(["-sS", "--rate", "50/s", "-o", "/dev/null"])
            // Standard output would be buffered.
            .args(["-w", "%{stderr}%{http_code}\n"])
            .args(["-H", "Host: worker-1:9100"])
            .args(["-H", &format!("Connection: {connection}")])
            .arg(format!("http://{listener}/metrics?[1-1000000]"));
        requests.push(curl.inside(Some(fixture.sites.cloud())).start()?);
    }
    let began = Instant::now();
    for (number, (text, _)) in BAD_FILES.iter().enumerate() {
        let (code, status) = reload(text).await?;
        ensure!(code == Some(64), "{text:?}: {code:?}, {status:?}");
        ensure!(!status.mistakes.is_empty(), "{text:?}");
        let (code, status) = reload(&good()).await?;
        ensure!(
            code == Some(0) && status.applied == ["limits"],
            "{status:?}"
        );
        say(&format!("line {number}")).await?;
    }
    let took = began.elapsed();
    let mut count = 0;
    for curl in requests {
        let codes = curl.log().lines();
        let failed = codes.iter().find(|code| *code != "200");
        ensure!(
            failed.is_none() && codes.len() > BAD_FILES.len(),
            "{failed:?}; {curl}"
        );
        count += codes.len();
        curl.kill().await?;
    }
    say("after").await?;
    drop(session.stdin);
    let ended = session.process.end(WAIT_TIMEOUT).await?;
    ensure!(ended.code() == Some(7), "{ended}");
    report_figure(&format!(
        "{} reloads in {took:?} with {count} requests",
        2 * BAD_FILES.len()
    ));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn p17_ansible_runs_a_script_on_both_nodes() -> Result<()> {
    let Some(fixture) = ConnectFixture::start(&[Tool::Ansible]).await? else {
        return Ok(());
    };
    let folder = fixture.scratch.path();
    let script = folder.join("mark.sh");
    fs::write(
        &script,
        format!(
            "#!/bin/sh\necho \"$CULVERT_NODE\" > {}/mark-$CULVERT_NODE\n",
            folder.display()
        ),
    )?;
    fs::set_permissions(&script, Permissions::from_mode(0o755))?;
    let arguments = fixture.options()?;
    let arguments: Vec<String> = arguments
        .chunks(2)
        .map(|pair| format!("-o '{}'", pair[1]))
        .collect();
    let inventory = format!(
        "{}\n[all:vars]\nansible_port={PORT}\nansible_user=root\nansible_remote_tmp={}\nansible_ssh_common_args=\"{}\"\n",
        NODES.join("\n"),
        folder.join("remote").display(),
        arguments.join(" ")
    );
    let inventory = fixture.scratch.file("inventory", inventory)?;
    let ansible = Program::tool(Tool::Ansible)?
        .args(["all", "-i"])
        .arg(inventory)
        .args(["-m", "script", "-a"])
        .arg(&script)
        .env("HOME", folder)
        .env("ANSIBLE_LOCAL_TEMP", folder.join("local"))
        .env("ANSIBLE_HOST_KEY_CHECKING", "False")
        .env("ANSIBLE_NOCOLOR", "1")
        .env("LC_ALL", "C.UTF-8");
    let ran = ansible.inside(Some(fixture.sites.cloud())).run().await?;
    ensure!(ran.code() == Some(0), "{}\n{}", ran.out, ran.err);
    for node in NODES {
        let mark = fs::read_to_string(folder.join(format!("mark-{node}")))?;
        ensure!(mark.trim() == node, "{mark:?}");
    }
    Ok(())
}
