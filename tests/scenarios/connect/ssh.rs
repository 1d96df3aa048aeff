//! P17: ssh and ansible by `tunnel-server connect` to nodes that are not directly reachable, two of
//! them with the same address.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::eventually::eventually;
use tunnel_tests::guides::{blocks, page};
use tunnel_tests::netns::{EDGE_ADDRESS, Edge, NODES, Topology};
use tunnel_tests::process::{Fleet, Listener, Process, Program, ScratchDir, Server};
use tunnel_tests::tools::{Skip, Tool, bin_dir, or_skip, require};

/// Port of each edge's sshd, in the edge's network namespace.
const PORT: &str = "22";
const GUIDE: &str = "docs/how-to/ssh-ansible.md";
/// A port that is not allowed and on which no process listens.
const FORBIDDEN: &str = "2223";
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// Two edges with an sshd each, and a server whose host may connect to them.
struct ConnectFixture {
    scratch: ScratchDir,
    key: PathBuf,
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
        let key = scratch.path().join("id");
        for name in ["id", "host"] {
            let keygen = Program::tool(Tool::SshKeygen)?
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(scratch.path().join(name));
            keygen.run().await?.ok()?;
        }
        let mut sshd = Vec::new();
        for edge in sites.edges() {
            match start_sshd(edge, scratch.path()) {
                Ok(started) => sshd.push(started?),
                Err(skip) => {
                    or_skip::<()>(Err(skip));
                    return Ok(None);
                }
            }
        }
        for edge in sites.edges() {
            wait_for_sshd(edge).await;
        }
        // The settings of the guide as they stand.
        let settings = blocks(&page(GUIDE)?).into_iter();
        let settings = settings.map(|block| block.text);
        let mut settings = settings.filter(|text| text.starts_with("ports:"));
        let settings = scratch.file("config.yaml", settings.next().context("ports")?)?;
        let settings = settings.to_string_lossy();
        let fleet = Fleet::start(&sites, &["--config", &settings]).await?;
        Ok(Some(Self {
            scratch,
            key,
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
        let known = self.scratch.path().join("known");
        let options = [
            format!("ProxyCommand={}", self.proxy_command()?),
            format!("IdentityFile={}", self.key.display()),
            "IdentitiesOnly=yes".to_owned(),
            "StrictHostKeyChecking=no".to_owned(),
            format!("UserKnownHostsFile={}", known.display()),
            "LogLevel=ERROR".to_owned(),
            "User=root".to_owned(),
        ];
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

/// Starts an sshd with its own configuration. Each session receives the node's name in
/// `CULVERT_NODE`.
fn start_sshd(edge: &Edge, scratch: &Path) -> Result<Result<Process>, Skip> {
    let node = edge.node_name();
    let failed = |error: std::io::Error| Skip::because(format!("cannot prepare sshd: {error}"));
    // sshd needs a user and a folder. Both exist only in this mount namespace.
    let passwd = scratch.join("passwd");
    let users = fs::read_to_string("/etc/passwd").map_err(failed)?;
    let others = users.lines().filter(|line| !line.starts_with("sshd:"));
    let own = ["sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin", ""];
    let users: Vec<&str> = others.chain(own).collect();
    fs::write(&passwd, users.join("\n")).map_err(failed)?;
    edge.node().script(&format!(
        "test \"$(id -u)\" = 0
         mount --bind '{}' /etc/passwd
         mount -t tmpfs -o mode=755 tmpfs /run
         mkdir -m 755 /run/sshd",
        passwd.display()
    ))?;
    let config = scratch.join(format!("{node}.sshd"));
    let (host, keys) = (scratch.join("host"), scratch.join("id.pub"));
    let text = format!(
        "ListenAddress {EDGE_ADDRESS}:{PORT}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\n\
         StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n\
         SetEnv CULVERT_NODE={node}\nSubsystem sftp internal-sftp\n",
        host.display(),
        keys.display()
    );
    fs::write(&config, text).map_err(failed)?;
    let sshd = Program::tool(Tool::Sshd)?
        .args(["-D", "-e", "-f"])
        .arg(config);
    Ok(sshd.inside(Some(edge.node())).start())
}

async fn wait_for_sshd(edge: &Edge) {
    let script = format!("exec 3<>/dev/tcp/{EDGE_ADDRESS}/{PORT}");
    eventually("sshd", WAIT_TIMEOUT, async || {
        let mut bash = edge.node().command("bash");
        let status = bash.args(["-c", &script]).status()?;
        ensure!(status.success(), "{status}");
        Ok(())
    })
    .await;
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
