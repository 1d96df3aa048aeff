//! A real kubelet with containerd, from the directory in `KUBEBUILDER_ASSETS`.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tunnel_server::config::EDGE_LABEL;

use crate::netns::Namespace;
use crate::process::{Process, Program, ScratchDir};
use crate::tools::{Skip, Tool, require};

/// A kubelet of an edge node, with a container runtime that has the image [`Kubelet::IMAGE`].
///
/// Containers have the network of the kubelet, and end with this value.
#[derive(Debug)]
pub struct Kubelet {
    _kubelet: Process,
    _containerd: Process,
    _scratch: ScratchDir,
}

/// Where a kubelet runs, and the callers that it serves.
#[derive(Debug)]
pub struct KubeletHost<'a> {
    pub node: &'a str,
    /// No loopback address.
    pub ip: Ipv4Addr,
    /// The namespace of the test if there is none.
    pub namespace: Option<&'a Namespace>,
    pub callers: KubeletCallers,
}

/// The callers that a kubelet serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KubeletCallers {
    Anyone,
    /// Bearer tokens and rights that the API server confirms, as with kubeadm.
    Reviewed,
}

impl KubeletCallers {
    fn settings(self) -> [Value; 2] {
        let is_reviewed = self == Self::Reviewed;
        let mode = if is_reviewed {
            "Webhook"
        } else {
            "AlwaysAllow"
        };
        [
            json!({ "anonymous": { "enabled": !is_reviewed }, "webhook": { "enabled": is_reviewed } }),
            json!({ "mode": mode }),
        ]
    }
}

impl Kubelet {
    /// The image that containers can use. It has busybox.
    pub const IMAGE: &str = "registry.invalid/busybox:1";

    /// Returns the kubelet's file.
    ///
    /// # Errors
    /// Returns [`Skip`] if the directory of kube-apiserver has no kubelet or a program of its
    /// runtime is missing.
    pub fn binary(binaries: &Path) -> Result<PathBuf, Skip> {
        require(&[
            Tool::Containerd,
            Tool::Ctr,
            Tool::Runc,
            Tool::Busybox,
            Tool::Unshare,
            Tool::Nsenter,
        ])?;
        let file = binaries.join("kubelet");
        if !file.is_file() {
            return Err(Skip::because("needs kubelet next to kube-apiserver"));
        }
        Ok(file)
    }

    /// Starts the runtime and the kubelet, which registers an edge node with the API server of
    /// `kubeconfig`.
    pub async fn start(kubelet: &Path, host: &KubeletHost<'_>, kubeconfig: &Path) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let folder = scratch.path();
        let containerd = containerd(&scratch, host.namespace).await?;
        let [authentication, authorization] = host.callers.settings();
        let socket = folder.join("containerd.sock");
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": authentication,
            "authorization": authorization,
            "cgroupsPerQOS": false,
            "containerRuntimeEndpoint": format!("unix://{}", socket.display()),
            "enforceNodeAllocatable": [],
            "evictionHard": { "nodefs.available": "0%", "imagefs.available": "0%" },
            "failCgroupV1": false,
            "failSwapOn": false,
            "localStorageCapacityIsolation": false,
            "nodeLeaseDurationSeconds": 8,
            "nodeStatusUpdateFrequency": "2s",
            "resolvConf": "",
            "syncFrequency": "2s",
            "volumePluginDir": folder.join("plugins"),
        });
        let config = scratch.file("kubelet.yaml", config.to_string())?;
        let kubelet = Program::at(kubelet)
            .args([
                format!("--config={}", config.display()),
                format!("--kubeconfig={}", kubeconfig.display()),
            ])
            .args([
                format!("--root-dir={}", folder.join("kubelet").display()),
                format!("--cert-dir={}", folder.join("certificates").display()),
            ])
            .args([
                format!("--hostname-override={}", host.node),
                format!("--node-ip={}", host.ip),
                format!("--node-labels={EDGE_LABEL}=true"),
            ])
            .through(namespaces_of(&containerd)?)
            .start()?;
        Ok(Self {
            _kubelet: kubelet,
            _containerd: containerd,
            _scratch: scratch,
        })
    }
}

/// Returns the command prefix that runs a program in the namespaces of containerd, which has the
/// mounts of the kubelet's volumes only then.
fn namespaces_of(containerd: &Process) -> Result<Vec<OsString>> {
    let parent = containerd.id().context("containerd has ended")?;
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"))?;
    let nsenter = Tool::Nsenter
        .find()
        .unwrap_or_else(|| Tool::Nsenter.program().into());
    let mut argv = vec![nsenter.into_os_string()];
    argv.extend(["-t", children.trim(), "-m", "-n", "-p", "--"].map(OsString::from));
    Ok(argv)
}

/// Starts containerd, with all its containers in a PID namespace that ends with containerd, and
/// imports the image.
async fn containerd(scratch: &ScratchDir, namespace: Option<&Namespace>) -> Result<Process> {
    let folder = scratch.path().display();
    // Pods on the host's network call no plugin, but containerd is not ready without a configuration.
    let networks = scratch.path().join("net.d");
    std::fs::create_dir(&networks)?;
    let network = json!({
        "cniVersion": "0.4.0", "name": "none", "plugins": [{ "type": "loopback" }],
    });
    std::fs::write(networks.join("10-none.conflist"), network.to_string())?;
    let config = format!(
        r#"version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{folder}/net.d"
"#,
        image = Kubelet::IMAGE,
    );
    let config = scratch.file("containerd.toml", config)?;
    let unshare = Tool::Unshare
        .find()
        .unwrap_or_else(|| Tool::Unshare.program().into());
    let mut containerd = Program::tool(Tool::Containerd)?
        .arg("--config")
        .arg(config)
        .through([
            unshare.into_os_string(),
            "--pid".into(),
            "--fork".into(),
            "--kill-child".into(),
            "--mount-proc".into(),
        ])
        .inside(namespace)
        .start()?;
    let booted = |line: &str| line.contains(BOOTED).then_some(());
    containerd.wait_for_line(BOOTED, START, booted).await?;
    let import = format!(
        "cd '{folder}'
         mkdir -p image/bin
         cp '{busybox}' image/bin/busybox
         for name in sh sleep echo cat; do ln -s busybox image/bin/$name; done
         tar -C image -cf layer.tar .
         digest=$(sha256sum layer.tar | cut -d' ' -f1)
         echo '{{\"architecture\":\"{architecture}\",\"os\":\"linux\",\"config\":{{\"Cmd\":[\"/bin/sleep\",\"1000000\"]}},\"rootfs\":{{\"type\":\"layers\",\"diff_ids\":[\"sha256:'$digest'\"]}}}}' >config.json
         echo '[{{\"Config\":\"config.json\",\"RepoTags\":[\"{image}\"],\"Layers\":[\"layer.tar\"]}}]' >manifest.json
         tar -cf image.tar manifest.json config.json layer.tar
         ctr -a containerd.sock -n k8s.io images import image.tar",
        busybox = Tool::Busybox.find().unwrap_or_default().display(),
        image = Kubelet::IMAGE,
        architecture = match std::env::consts::ARCH {
            "aarch64" => "arm64",
            _ => "amd64",
        },
    );
    let shell = Program::at(Path::new("sh")).args(["-ec", &import]);
    shell.inside(namespace).run().await?.ok()?;
    Ok(containerd)
}

/// Log line of containerd when its socket is open.
const BOOTED: &str = "containerd successfully booted";

const START: Duration = Duration::from_secs(30);
