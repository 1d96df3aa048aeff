//! Runs one of the binaries as a kubelet would run its container: arguments, environment, mounts,
//! user, no capability, and a read-only root.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::Container;
use crate::netns::Namespace;
use crate::process::Program;
use crate::tools::{Skip, Tool, bin_dir};

/// Returns the program of `container` inside `namespace`, with a root created in `folder`.
/// `objects` contains the ConfigMaps and Secrets of its volumes, and `token` replaces each
/// ServiceAccount token.
///
/// # Errors
/// Returns an error that contains [`Skip`] if this process lacks the required privileges, or
/// another error if a file cannot be written.
pub fn pod_program(
    container: &Container,
    (folder, namespace): (&Path, &Namespace),
    objects: &[Value],
    token: &str,
) -> Result<Result<Program, Skip>> {
    if fs::metadata("/proc/self")?.uid() != 0 {
        return Ok(Err(Skip::because("needs root, to run as another user")));
    }
    let name = container.spec["name"].as_str().context("a name")?;
    let binary = bin_dir().context("folder of the binaries")?.join(name);
    // The paths in the arguments stay: here they are those of the new root.
    container.laid_out(folder, objects, token)?;
    for mount in ["usr", "proc", "dev", "etc"] {
        fs::create_dir_all(folder.join(mount))?;
    }
    for (link, to) in [("lib", "usr/lib"), ("lib64", "usr/lib64")] {
        symlink(to, folder.join(link))?;
    }
    for file in ["etc/resolv.conf", "etc/hosts"] {
        fs::copy(Path::new("/").join(file), folder.join(file))?;
    }
    fs::write(folder.join(name), [])?;
    let group = container.pod["securityContext"]["fsGroup"].as_u64();
    let group = u32::try_from(group.unwrap_or_default())?;
    let mut writable = Vec::new();
    for (path, volume) in &container.mounts {
        let inside = folder.join(path.strip_prefix("/").unwrap_or(path));
        if volume.get("emptyDir").is_some() {
            chown(&inside, Some(0), Some(group))?;
            fs::set_permissions(&inside, fs::Permissions::from_mode(0o2777))?;
            writable.push(inside.display().to_string());
        } else if volume["hostPath"]["type"] == "DirectoryOrCreate" {
            // As the kubelet creates the directory on the host.
            chown(&inside, Some(0), Some(0))?;
            fs::set_permissions(&inside, fs::Permissions::from_mode(0o755))?;
            writable.push(inside.display().to_string());
        } else {
            own(&inside, group)?;
        }
    }
    let unshare = match Program::tool(Tool::Unshare) {
        Ok(unshare) => unshare,
        Err(skip) => return Ok(Err(skip)),
    };
    let script = SCRIPT.replace("WRITABLE", &writable.join(" "));
    let mut program = unshare
        .args(["-m", "--propagation", "private", "sh", "-ec", &script, "sh"])
        .arg(folder)
        .arg(&binary)
        .args([
            name.to_owned(),
            container.uid.to_string(),
            group.to_string(),
        ])
        .args(&container.args);
    for (name, value) in &container.env {
        program = program.env(name, value);
    }
    Ok(Ok(program.inside(Some(namespace))))
}

/// Sets the owner and mode of a volume's files as `fsGroup` and `defaultMode` 0440 do.
fn own(folder: &Path, group: u32) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        chown(&path, Some(0), Some(group))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o440))?;
    }
    Ok(())
}

/// Arguments: root, binary, its name, user, group, arguments. WRITABLE is replaced by the
/// directories that stay writable.
const SCRIPT: &str = r#"
root=$1 binary=$2 name=$3 user=$4 group=$5; shift 5
mount --bind "$root" "$root"
mount --bind "$binary" "$root/$name"
mount --rbind /usr "$root/usr"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
for folder in WRITABLE; do mount --bind "$folder" "$folder"; done
mount -o remount,bind,ro "$root"
exec chroot "$root" /usr/bin/setpriv --reuid "$user" --regid "$group" --groups "$group" \
  --no-new-privs --inh-caps=-all --bounding-set=-all "/$name" "$@"
"#;
