//! The table of https targets in `docs/reference/targets.md`, each a server of OpenSSL.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::process::{Process, Program, ScratchDir};
use tunnel_tests::reference::{
    CertificateIssuer, CertificateRecipe, TARGETS, TargetCase, TargetVerdict,
};
use tunnel_tests::tools::{Tool, or_skip, require};

const CA_KEY: &str = "-algorithm EC -pkeyopt ec_paramgen_curve:P-256";
const CA_EXTENSIONS: &str = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign";
/// Intermediate CAs that exist.
const INTERMEDIATES: usize = 8;

#[tokio::test(flavor = "multi_thread")]
async fn targets_of_the_reference_are_accepted_or_refused_by_name() -> Result<()> {
    if or_skip(require(&[Tool::Openssl])).is_none() {
        return Ok(());
    }
    let files = OpensslFiles::new().await?;
    let (tunnel, _agent) = site(None).await?;
    let (verify, _other_agent) = site(Some(files.path("ca.crt"))).await?;
    let mut wrong = String::new();
    for case in TARGETS {
        let (target, port) = files.serve(case).await.context(case.target)?;
        for (mode, env, expected) in [
            ("tunnel", &tunnel, case.tunnel),
            ("verify", &verify, case.verify),
        ] {
            let get = RawRequest::get(&format!("worker-1:{port}"), "/");
            let reply = request(env.https("worker-1")?, &get).await?;
            let (code, text) = (reply.header("x-tunnel-error"), reply.text());
            let is_expected = match expected {
                TargetVerdict::Accepted => reply.status == 200 && code.is_none(),
                TargetVerdict::Refused(words) => code == Some("target_tls") && text.contains(words),
            };
            if !is_expected {
                wrong += &format!(
                    "\n{} ({mode}): {expected:?}, got {} {code:?}: {}",
                    case.target,
                    reply.status,
                    text.chars().take(400).collect::<String>()
                );
            }
        }
        target.kill().await?;
    }
    ensure!(wrong.is_empty(), "{wrong}");
    Ok(())
}

/// Starts a server for https targets, which verifies them by `ca` if there is one, and an agent.
async fn site(ca: Option<PathBuf>) -> Result<(TestEnv, Agent)> {
    let env = TestEnv::start_with(|settings| {
        settings.https_proxy_ports = Some("1024-65535".into());
        settings.http_proxy_ports = None;
        if let Some(ca) = ca {
            settings.target_tls = Some("verify".into());
            settings.target_ca = Some(ca.to_string_lossy().into_owned());
        }
    })
    .await?;
    let agent = env.agent("worker-1").await?;
    Ok((env, agent))
}

/// Keys and certificates that OpenSSL makes.
struct OpensslFiles {
    scratch: ScratchDir,
}

impl OpensslFiles {
    /// Makes a CA for targets, another CA, and a chain of CAs below the first one.
    async fn new() -> Result<Self> {
        let files = Self {
            scratch: ScratchDir::new()?,
        };
        files.scratch.file("ca.ext", CA_EXTENSIONS)?;
        for name in ["ca", "other"] {
            files.request(name, CA_KEY).await?;
            files.sign(name, name, "ca.ext", "-days 30").await?;
        }
        let mut issuer = "ca".to_owned();
        for number in 1..=INTERMEDIATES {
            let name = format!("below-{number}");
            files.request(&name, CA_KEY).await?;
            files.sign(&name, &issuer, "ca.ext", "-days 30").await?;
            issuer = name;
        }
        Ok(files)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Starts the target of a case. Returns it with its port.
    async fn serve(&self, case: &TargetCase) -> Result<(Process, u16)> {
        self.leaf(&case.certificate).await?;
        let openssl =
            self.openssl("s_server -www -accept 127.0.0.1:0 -cert leaf.crt -key leaf.key");
        let chain = self.chain(case.certificate.issuer)?;
        let chain = chain.map(|file| format!("-cert_chain {}", file.display()));
        let words = chain.iter().flat_map(|argument| argument.split(' '));
        let mut target = openssl?
            .args(words)
            .args(case.server.split_whitespace())
            .start()?;
        let listens = |line: &str| line.strip_prefix("ACCEPT 127.0.0.1:")?.trim().parse().ok();
        let port = target
            .wait_for_line("ACCEPT", WAIT_TIMEOUT, listens)
            .await?;
        Ok((target, port))
    }

    async fn leaf(&self, recipe: &CertificateRecipe) -> Result<()> {
        self.request("leaf", recipe.key).await?;
        self.scratch.file("leaf.ext", recipe.extensions)?;
        let issuer = match recipe.issuer {
            CertificateIssuer::Trusted | CertificateIssuer::Repeated(_) => "ca".to_owned(),
            CertificateIssuer::Itself => "leaf".to_owned(),
            CertificateIssuer::AnotherCa => "other".to_owned(),
            CertificateIssuer::Below(count) => format!("below-{count}"),
        };
        let extensions = if recipe.extensions.is_empty() {
            ""
        } else {
            "leaf.ext"
        };
        self.sign("leaf", &issuer, extensions, recipe.arguments)
            .await
    }

    /// Writes the certificates that a target sends behind its own.
    fn chain(&self, issuer: CertificateIssuer) -> Result<Option<PathBuf>> {
        let names = match issuer {
            CertificateIssuer::Trusted
            | CertificateIssuer::Itself
            | CertificateIssuer::AnotherCa => return Ok(None),
            CertificateIssuer::Below(count) => {
                let numbers = (1..=count).rev();
                numbers.map(|number| format!("below-{number}")).collect()
            }
            CertificateIssuer::Repeated(count) => vec!["ca".to_owned(); count],
        };
        let mut chain = String::new();
        for name in names {
            chain += &std::fs::read_to_string(self.path(&format!("{name}.crt")))?;
        }
        Ok(Some(self.scratch.file("chain.pem", chain)?))
    }

    /// Makes a key and a request for a certificate.
    async fn request(&self, name: &str, key: &str) -> Result<()> {
        self.run(&format!("genpkey {key} -out {name}.key")).await?;
        let subject = if name == "leaf" { "worker-1" } else { name };
        let arguments = format!("req -new -key {name}.key -subj /CN={subject} -out {name}.csr");
        self.run(&arguments).await
    }

    /// Signs a request, by its own key if `issuer` is `name`.
    async fn sign(&self, name: &str, issuer: &str, extensions: &str, more: &str) -> Result<()> {
        let by = if issuer == name {
            format!("-signkey {name}.key")
        } else {
            format!("-CA {issuer}.crt -CAkey {issuer}.key -CAcreateserial")
        };
        let extensions = match extensions {
            "" => String::new(),
            file => format!("-extfile {file}"),
        };
        self.run(&format!(
            "x509 -req -in {name}.csr {by} {extensions} {more} -out {name}.crt"
        ))
        .await
    }

    async fn run(&self, words: &str) -> Result<()> {
        self.openssl(words)?.run().await?.ok()?;
        Ok(())
    }

    /// Returns OpenSSL with arguments in which names with a dot are files of the folder.
    fn openssl(&self, words: &str) -> Result<Program> {
        let words = words.split_whitespace().map(|word| {
            let is_file = [".key", ".csr", ".crt", ".ext"]
                .iter()
                .any(|end| word.ends_with(end));
            if is_file {
                self.path(word).to_string_lossy().into_owned()
            } else {
                word.to_owned()
            }
        });
        Ok(Program::tool(Tool::Openssl)?.args(words))
    }
}
