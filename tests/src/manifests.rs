//! The manifests of `deploy/manifests`: rendered by kubectl and parsed, with the configuration of
//! their containers.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::ByteString;
use serde_json::Value;

mod pod;

pub use pod::pod_program;

/// The overlays, each a directory of `deploy/manifests/overlays`.
pub const OVERLAYS: [&str; 10] = [
    "plain",
    "openyurt",
    "kubelet-cert",
    "egress-selector",
    "egress-selector-tcp",
    "hostport",
    "loadbalancer",
    "namespace",
    "require-certificate",
    "scale",
];
/// The overlay that is rendered as `install.yaml`.
pub const INSTALLED: &str = "plain";

/// The value of `server` in ConfigMap `tunnel-agent` until somebody writes an address.
pub const ADDRESS_PLACEHOLDER: &str = "the address in ConfigMap tunnel-agent is not set";

/// Returns the root of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the directory of the manifests.
pub fn folder() -> PathBuf {
    repository().join("deploy/manifests")
}

/// Returns the directory of an overlay.
pub fn overlay(name: &str) -> PathBuf {
    folder().join("overlays").join(name)
}

/// Returns the objects of `install.yaml`.
pub fn installed() -> Result<Vec<Value>> {
    let file = folder().join("install.yaml");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    documents(&text)
}

/// Returns the documents of a YAML file in order.
pub fn documents(text: &str) -> Result<Vec<Value>> {
    let mut documents = Vec::new();
    let mut current = String::new();
    for line in text.lines().chain(["---"]) {
        if line != "---" {
            current.push_str(line);
            current.push('\n');
            continue;
        }
        let begun = std::mem::take(&mut current);
        let is_empty = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
        if !begun.lines().all(is_empty) {
            let document = serde_saphyr::from_str(&begun);
            documents.push(document.with_context(|| begun.clone())?);
        }
    }
    Ok(documents)
}

/// Returns the output of `kubectl kustomize` for a directory.
///
/// # Errors
/// Returns an error if kubectl fails, or warns of a deprecated field.
pub fn render(kubectl: &Path, folder: &Path) -> Result<Vec<Value>> {
    let output = Command::new(kubectl)
        .arg("kustomize")
        .arg(folder)
        .output()
        .with_context(|| kubectl.display().to_string())?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && !errors.contains("deprecated"),
        "{} kustomize {}: {errors}",
        kubectl.display(),
        folder.display(),
    );
    documents(std::str::from_utf8(&output.stdout)?)
}

/// Replaces the placeholder for the address that agents dial.
///
/// # Errors
/// Returns an error if there is no placeholder.
pub fn set_address(objects: &mut [Value], address: &str) -> Result<()> {
    let is_map = |object: &&mut Value| {
        object["kind"] == "ConfigMap" && object["metadata"]["name"] == "tunnel-agent"
    };
    let map = objects.iter_mut().find(is_map);
    let server = &mut map.context("no ConfigMap tunnel-agent")?["data"]["server"];
    ensure!(*server == ADDRESS_PLACEHOLDER, "{server}");
    *server = address.into();
    Ok(())
}

pub fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> Result<&'a Value> {
    objects
        .iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
        .with_context(|| format!("no {kind} {name}"))
}

/// Returns the items of a list, or none if there is no list.
pub fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// The facts that a node provides to its pods.
#[derive(Debug, Clone)]
pub struct Facts {
    pub node: String,
    pub address: String,
}

/// The only container of a workload, as a kubelet would run it.
#[derive(Debug, Clone)]
pub struct Container {
    /// Arguments, without the program.
    pub args: Vec<String>,
    /// Environment variables set by the manifest.
    pub env: BTreeMap<String, String>,
    /// Mount paths with their volumes.
    pub mounts: Vec<(PathBuf, Value)>,
    /// User ID of the process.
    pub uid: u64,
    /// The container as written.
    pub spec: Value,
    /// The pod as written.
    pub pod: Value,
}

impl Container {
    /// Returns the container of a Deployment or a DaemonSet. ConfigMaps are looked up among
    /// `objects`.
    ///
    /// # Errors
    /// Returns an error unless there is exactly one container and all its references exist.
    pub fn of(workload: &Value, objects: &[Value], facts: &Facts) -> Result<Self> {
        let pod = &workload["spec"]["template"]["spec"];
        let [spec] = pod["containers"].as_array().map_or(&[][..], Vec::as_slice) else {
            bail!("not one container: {pod}");
        };
        let mut env = BTreeMap::new();
        for entry in items(&spec["env"]) {
            let name = entry["name"].as_str().context("a variable has a name")?;
            env.insert(name.to_owned(), variable(entry, objects, facts)?);
        }
        let expanded = |word: &Value| -> Result<String> {
            let mut word = word.as_str().context("an argument is a text")?.to_owned();
            for (name, value) in &env {
                word = word.replace(&format!("$({name})"), value);
            }
            Ok(word)
        };
        let args = items(&spec["args"])
            .map(expanded)
            .collect::<Result<Vec<_>>>()?;
        let mut mounts = Vec::new();
        for mount in items(&spec["volumeMounts"]) {
            let volume = items(&pod["volumes"]).find(|volume| volume["name"] == mount["name"]);
            let volume = volume.with_context(|| format!("no volume for {mount}"))?;
            let path = mount["mountPath"].as_str().context("mountPath")?;
            mounts.push((PathBuf::from(path), volume.clone()));
        }
        let uid = pod["securityContext"]["runAsUser"].as_u64();
        Ok(Self {
            args,
            env,
            mounts,
            uid: uid.context("runAsUser")?,
            spec: spec.clone(),
            pod: pod.clone(),
        })
    }

    /// Creates the mounts under `root`, with the content of ConfigMaps and Secrets, and with
    /// `token` in place of ServiceAccount tokens. Returns the arguments with their paths changed
    /// accordingly. Host paths do not change.
    pub fn laid_out(&self, root: &Path, objects: &[Value], token: &str) -> Result<Vec<String>> {
        let mut args = self.args.clone();
        for (path, volume) in &self.mounts {
            let inside = root.join(path.strip_prefix("/").unwrap_or(path));
            fs::create_dir_all(&inside)?;
            for source in items(&volume["projected"]["sources"]).chain([volume]) {
                fill(&inside, source, objects, token)?;
            }
            let (from, to) = (path.display().to_string(), inside.display().to_string());
            for word in &mut args {
                *word = word.replace(&format!("={from}"), &format!("={to}"));
            }
        }
        Ok(args)
    }
}

/// Writes the files of one volume source.
fn fill(folder: &Path, source: &Value, objects: &[Value], token: &str) -> Result<()> {
    if let Some(path) = source["serviceAccountToken"]["path"].as_str() {
        mount(&folder.join(path), token)?;
    }
    if let Some(name) = source["configMap"]["name"].as_str()
        && let Ok(map) = find(objects, "ConfigMap", name)
    {
        for item in items(&source["configMap"]["items"]) {
            let (key, path) = (item["key"].as_str(), item["path"].as_str());
            let (key, path) = key.zip(path).context("an item has key and path")?;
            if let Some(text) = map["data"][key].as_str() {
                mount(&folder.join(path), text)?;
            }
        }
    }
    if let Some(name) = source["secret"]["secretName"].as_str() {
        let is_optional = source["secret"]["optional"] == true;
        match find(objects, "Secret", name) {
            Ok(secret) => {
                for (key, value) in secret["data"].as_object().into_iter().flatten() {
                    let bytes: ByteString = serde_json::from_value(value.clone())?;
                    mount(&folder.join(key), bytes.0)?;
                }
            }
            Err(absent) => ensure!(is_optional, "{absent}"),
        }
    }
    for item in items(&source["downwardAPI"]["items"]) {
        let path = item["path"].as_str().context("an item has a path")?;
        mount(&folder.join(path), "kube-system")?;
    }
    Ok(())
}

/// Writes a file as a kubelet does, independent of the umask.
fn mount(file: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    fs::write(file, content)?;
    fs::set_permissions(file, fs::Permissions::from_mode(0o644))?;
    Ok(())
}

fn variable(entry: &Value, objects: &[Value], facts: &Facts) -> Result<String> {
    if let Some(value) = entry["value"].as_str() {
        return Ok(value.to_owned());
    }
    let from = &entry["valueFrom"];
    if let Some(name) = from["configMapKeyRef"]["name"].as_str() {
        let key = from["configMapKeyRef"]["key"].as_str().context("key")?;
        let value = find(objects, "ConfigMap", name)?["data"][key].as_str();
        return Ok(value.with_context(|| format!("no key {key}"))?.to_owned());
    }
    match from["fieldRef"]["fieldPath"].as_str() {
        Some("spec.nodeName") => Ok(facts.node.clone()),
        Some("status.hostIP") => Ok(facts.address.clone()),
        other => bail!("a variable from {other:?}: {entry}"),
    }
}
