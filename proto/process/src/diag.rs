//! The document of the verb `diag`: facts about a process for a bug report, without secrets.
//!
//! Every fact has a time limit, and a fact that cannot be obtained is an object with the key
//! `error`. Types with secrets print a placeholder in `Debug`; in addition, what looks like a
//! secret is replaced in every text of the document.

use std::error::Error;
use std::ffi::OsString;
use std::fmt::Debug;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value, json};
use tokio::time::{Instant, timeout_at};

use super::errors::causes;
use super::meta::MetaAddress;
use super::metrics::COMMIT;
use super::schema::SCHEMA_VERSION;
use super::{files, telemetry};

pub mod redact;

use redact::redacted;

/// Time limit of one fact. A busy disk may need seconds.
const FACT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of all facts, below the 30 s of the verb.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(25);
/// Maximum number of listed files. A data directory has about twenty.
const FILES_MAX: usize = 1000;

/// A document that is being filled.
#[derive(Debug)]
pub struct DiagDocument {
    facts: Map<String, Value>,
    deadline: Instant,
}

impl DiagDocument {
    /// Creates a document with the facts that are always there: the program and the system.
    pub fn new(program: &str, version: &str) -> Self {
        let mut facts = Map::new();
        let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        facts.insert("schemaVersion".to_owned(), json!(SCHEMA_VERSION));
        facts.insert("createdAt".to_owned(), json!(now));
        facts.insert(
            "program".to_owned(),
            json!({ "name": program, "version": version, "commit": COMMIT }),
        );
        facts.insert(
            "system".to_owned(),
            json!({
                "os": std::env::consts::OS,
                "architecture": std::env::consts::ARCH,
                "kernel": fs::read_to_string(KERNEL_FILE).unwrap_or_default().trim_end(),
            }),
        );
        Self {
            facts,
            deadline: Instant::now() + TOTAL_TIMEOUT,
        }
    }

    /// Adds a fact. If it fails or takes longer than 10 s, the document has the error. Cancel-safe:
    /// a fact that is dropped is left out.
    pub async fn add<E: Error + 'static>(
        &mut self,
        name: &str,
        fact: impl Future<Output = Result<Value, E>>,
    ) {
        let limit = (Instant::now() + FACT_TIMEOUT).min(self.deadline);
        match timeout_at(limit, fact).await {
            Ok(Ok(value)) => self.insert(name, value),
            Ok(Err(error)) => self.add_error(name, &causes(&error)),
            Err(_elapsed) => self.add_error(name, "no answer in time"),
        }
    }

    /// Adds the reason why a fact cannot be obtained.
    pub fn add_error(&mut self, name: &str, error: &str) {
        self.insert(name, json!({ "error": error }));
    }

    /// Adds the settings as this command reads them. Those of a running process may differ.
    pub fn add_settings<E: Error + 'static>(&mut self, settings: Result<impl Debug, E>) {
        match settings {
            Ok(settings) => self.insert("settings", json!(settings_lines(&settings))),
            Err(error) => self.add_error("settings", &causes(&error)),
        }
    }

    fn insert(&mut self, name: &str, fact: Value) {
        self.facts.insert(name.to_owned(), fact);
    }

    /// Adds the conditions and the metrics of a running process.
    pub async fn add_meta(&mut self, address: &MetaAddress) {
        for (name, path) in [("conditions", "/readyz?verbose"), ("metrics", "/metrics")] {
            let page = async {
                let (status, body) = address.get(path).await?;
                let lines: Vec<&str> = body.lines().collect();
                Ok::<_, io::Error>(json!({ "status": status.as_u16(), "lines": lines }))
            };
            self.add(name, page).await;
        }
    }

    /// Adds the names, sizes, modes and owners of the files in a directory. No file is opened.
    pub async fn add_files(&mut self, dir: PathBuf) {
        let listing = async {
            tokio::task::spawn_blocking(move || list_files(&dir))
                .await
                .map_err(io::Error::other)?
        };
        self.add("files", listing).await;
    }

    /// Writes the document to a new file with mode 0600 and prints the path, or prints the document
    /// if the path is `-`.
    ///
    /// # Errors
    /// The system's error with the path; `AlreadyExists` for an existing file.
    pub fn write(self, path: &Path) -> io::Result<()> {
        let text = self.into_text()?;
        if path == Path::new("-") {
            return telemetry::print(&text);
        }
        files::create(path, &text)?;
        telemetry::print(format!("{}\n", path.display()).as_bytes())
    }

    fn into_text(self) -> io::Result<Vec<u8>> {
        let document = redacted(Value::Object(self.facts));
        let mut text = serde_json::to_vec_pretty(&document).map_err(io::Error::other)?;
        text.push(b'\n');
        Ok(text)
    }
}

/// Returns the default name of a document: what it is about, a program or a node, and the time in UTC.
pub fn default_path(subject: &str, now: SystemTime) -> PathBuf {
    let time = humantime::format_rfc3339_seconds(now).to_string();
    format!("{subject}-diag-{}.json", time.replace(':', "")).into()
}

/// Returns the settings of a process as lines. Secrets are placeholders, because the types of
/// secrets have no other `Debug`.
pub fn settings_lines(settings: &impl Debug) -> Vec<String> {
    let text = format!("{settings:#?}");
    text.lines().map(str::to_owned).collect()
}

fn list_files(dir: &Path) -> io::Result<Value> {
    let mut entries = fs::read_dir(dir)?
        .take(FILES_MAX)
        .map(|entry| {
            let entry = entry?;
            // The metadata of a link is its own, and not that of its target.
            Ok((entry.file_name(), entry.metadata()?))
        })
        .collect::<io::Result<Vec<(OsString, Metadata)>>>()?;
    entries.sort_by(|(left, _), (right, _)| left.cmp(right));
    let entries = entries
        .iter()
        .map(|(name, metadata)| file_facts(&name.to_string_lossy(), metadata));
    Ok(json!({
        "directory": file_facts(&dir.to_string_lossy(), &fs::metadata(dir)?),
        "entries": entries.collect::<Vec<Value>>(),
    }))
}

/// Returns what `ls -l` shows of a file. The first digits of the mode are the file type.
fn file_facts(name: &str, metadata: &Metadata) -> Value {
    json!({
        "name": name,
        "bytes": metadata.len(),
        "mode": format!("{:06o}", metadata.mode()),
        "user": metadata.uid(),
        "group": metadata.gid(),
        "modified": metadata.mtime(),
    })
}

const KERNEL_FILE: &str = "/proc/sys/kernel/osrelease";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::ScratchDir;

    #[tokio::test(start_paused = true)]
    async fn facts_that_fail_or_hang_have_an_error_and_the_others_are_there() {
        let started = Instant::now();
        let mut document = DiagDocument::new("program", "1.2.3");
        let failed = async { Err::<Value, _>(io::Error::other("https://a:canary@b")) };
        document.add("failed", failed).await;
        for name in ["first", "second", "third", "fourth"] {
            let hangs = std::future::pending::<Result<Value, io::Error>>();
            document.add(name, hangs).await;
        }
        let good = async { Ok::<_, io::Error>(json!(["a", 1])) };
        document.add("good", good).await;
        assert!(started.elapsed() < TOTAL_TIMEOUT + Duration::from_secs(1));
        let document: Value = serde_json::from_slice(&document.into_text().unwrap()).unwrap();
        assert_eq!(document["program"]["version"], "1.2.3");
        assert_eq!(document["failed"]["error"], "[redacted]@b");
        for name in ["first", "fourth"] {
            assert_eq!(document[name]["error"], "no answer in time");
        }
        assert_eq!(document["good"], json!(["a", 1]));
    }

    #[tokio::test]
    async fn files_are_listed_without_their_content_and_no_file_is_overwritten() {
        let scratch = ScratchDir::new().unwrap();
        let dir = scratch.path();
        files::create(&dir.join("ca.key"), b"canary").unwrap();
        let mut document = DiagDocument::new("program", "1.2.3");
        document.add_files(dir.to_owned()).await;
        let entry = &document.facts["files"]["entries"][0];
        assert_eq!(entry["name"], "ca.key");
        assert_eq!(
            (&entry["bytes"], &entry["mode"]),
            (&json!(6), &json!("100600"))
        );
        document.add_files(dir.join("absent")).await;
        assert!(document.facts["files"]["error"].is_string());

        let path = dir.join(default_path("program", SystemTime::UNIX_EPOCH));
        assert!(path.ends_with("program-diag-1970-01-01T000000Z.json"));
        document.write(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(!fs::read_to_string(&path).unwrap().contains("canary"));
        let again = DiagDocument::new("program", "1.2.3").write(&path);
        assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }
}
