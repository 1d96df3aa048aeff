use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use tokio::runtime::Builder;

use super::*;
use crate::testing::ScratchDir;

const CONFIG: &str = "etc/culvert/tunnel-agent.yaml";
const TOKEN: &str = "etc/culvert/tunnel-agent.token";
const UNIT: &str = "etc/systemd/system/tunnel-agent.service";

/// A host below a directory, and a file with a token outside of it.
struct Host {
    scratch: ScratchDir,
    root: PathBuf,
}

impl Host {
    fn new() -> Self {
        let scratch = ScratchDir::new().unwrap();
        let root = scratch.path().join("root");
        let host = Self { scratch, root };
        host.set_token(&token(1).reveal());
        host
    }

    fn set_token(&self, text: &str) {
        files::replace(&self.token_file(), text.as_bytes()).unwrap();
    }

    fn token_file(&self) -> PathBuf {
        self.scratch.path().join("token")
    }

    fn arguments(&self) -> JoinArgs {
        JoinArgs {
            server: vec!["cloud.example:10262".to_owned()],
            node_name: Some("worker-1".to_owned()),
            token_file: Some(self.token_file()),
            root: Some(self.root.clone()),
            no_start: false,
            dry_run: false,
            yes: false,
        }
    }

    /// Runs the verb with an answer of the operator, and returns what is printed.
    fn join(&self, arguments: &JoinArgs, answer: Answer) -> Result<String, JoinCommandError> {
        let mut printed = String::new();
        let print = |text: &str| {
            printed.push_str(text);
            Ok(())
        };
        let joining = run(arguments, |_question| Ok(answer), print);
        Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(joining)?;
        Ok(printed)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        files::replace(&path, text.as_bytes()).unwrap();
        self.set_mode(&path, 0o644);
    }

    fn set_mode(&self, path: &Path, mode: u32) {
        let path = self.root.join(path);
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn content(&self, path: &str) -> String {
        std::fs::read_to_string(self.root.join(path)).unwrap()
    }

    fn mode(&self, path: &str) -> u32 {
        let metadata = std::fs::metadata(self.root.join(path)).unwrap();
        metadata.permissions().mode() & 0o777
    }
}

/// Returns a token whose id ends with a number.
fn token(number: u8) -> JoinToken {
    JoinToken::new(&format!("abcdefghijk{number}"), &[7; 24], Some([9; 32])).unwrap()
}

#[test]
fn files_are_written_once_and_the_next_run_changes_nothing() {
    let host = Host::new();
    let printed = host.join(&host.arguments(), Answer::NoTerminal).unwrap();
    for (path, mode) in [
        (CONFIG, 0o644),
        (TOKEN, 0o600),
        (UNIT, 0o644),
        ("etc/sysusers.d/tunnel-agent.conf", 0o644),
        ("etc/tmpfiles.d/tunnel-agent.conf", 0o644),
    ] {
        assert_eq!(host.mode(path), mode, "{path}");
        assert!(printed.contains(&format!("wrote /{path}")), "{printed}");
    }
    assert!(host.content(CONFIG).contains("nodeName: \"worker-1\"\n"));
    assert_eq!(host.content(TOKEN), token(1).reveal());
    assert!(!printed.contains(&token(1).reveal()));
    let again = host.join(&host.arguments(), Answer::NoTerminal).unwrap();
    assert!(again.starts_with("nothing to change"), "{again}");
}

#[test]
fn values_that_differ_are_replaced_only_with_consent() {
    let host = Host::new();
    host.join(&host.arguments(), Answer::NoTerminal).unwrap();
    host.set_token(&token(2).reveal());
    let mut arguments = host.arguments();
    arguments.server = vec!["other.example:10262".to_owned()];
    let refused = host.join(&arguments, Answer::NoTerminal).unwrap_err();
    let text = refused.to_string();
    for part in ["cloud.example:10262", "abcdefghijk2", "--yes"] {
        assert!(text.contains(part), "{text}");
    }
    let declined = host.join(&arguments, Answer::No).unwrap_err();
    assert!(matches!(declined, JoinCommandError::Declined));
    assert_eq!(host.content(TOKEN), token(1).reveal());
    assert!(host.content(CONFIG).contains("cloud.example"));

    host.join(&arguments, Answer::Yes).unwrap();
    assert_eq!(host.content(TOKEN), token(2).reveal());
    assert!(host.content(CONFIG).contains("other.example"));
    host.write(UNIT, "[Unit]\n");
    arguments.yes = true;
    host.join(&arguments, Answer::NoTerminal).unwrap();
    assert!(host.content(UNIT).contains("ExecStart="));
}

#[test]
fn tokens_that_no_agent_could_use_alone_are_refused_and_nothing_is_written() {
    let host = Host::new();
    let whole = token(1).reveal();
    let (unpinned, _hash) = whole.rsplit_once('.').unwrap();
    let other_secret = whole.replace('7', "x");
    for (text, reason) in [
        ("", "is empty"),
        ("hello", "not a join token"),
        (unpinned, "pins no CA"),
        (other_secret.as_str(), "invalid secret"),
        ("eyJhbGciOiJSUzI1NiJ9.e30.c2ln", "ServiceAccount"),
    ] {
        host.set_token(text);
        let refused = host.join(&host.arguments(), Answer::Yes).unwrap_err();
        assert!(refused.is_usage(), "{refused}");
        let shown = refused.to_string();
        assert!(shown.contains(reason), "{shown}");
        assert!(text.is_empty() || !shown.contains(text), "{shown}");
        assert!(!host.root.exists());
    }
}

#[test]
fn dry_run_writes_nothing_and_asks_nothing() {
    let host = Host::new();
    let mut arguments = host.arguments();
    arguments.dry_run = true;
    let printed = host.join(&arguments, Answer::No).unwrap();
    assert!(printed.contains("would write /etc/culvert/"), "{printed}");
    assert!(!host.root.exists());
}

#[test]
fn unit_of_the_package_stays_and_its_user_owns_the_token() {
    let host = Host::new();
    host.write("lib/systemd/system/tunnel-agent.service", "[Unit]\n");
    let package = include_str!("../../../deploy/deb/tunnel-agent.yaml");
    host.write(CONFIG, package);
    host.write("etc/passwd", "root:x:0:0::/:/bin/sh\n");
    let refused = host.join(&host.arguments(), Answer::Yes).unwrap_err();
    assert!(matches!(refused, JoinCommandError::NoUser));

    // Only root may give the file to a user other than its own.
    let own = std::fs::metadata(&host.root).unwrap();
    let user = format!("tunnel-agent:!:{}:{}::/:/bin/false\n", own.uid(), own.gid());
    host.write("etc/passwd", &user);
    host.join(&host.arguments(), Answer::NoTerminal).unwrap();
    assert!(!host.root.join(UNIT).exists());
    assert_eq!(host.mode(TOKEN), 0o600);
    assert!(
        host.content(CONFIG)
            .starts_with(package.lines().next().unwrap())
    );
}

/// An operator writes the token as root.
#[test]
fn token_of_another_user_is_written_again_for_the_service() {
    let host = Host::new();
    let own = std::fs::metadata(host.scratch.path()).unwrap();
    let user = format!("tunnel-agent:!:{}:{}::/:/bin/false\n", own.uid(), own.gid());
    host.write("etc/passwd", &user);
    host.join(&host.arguments(), Answer::NoTerminal).unwrap();
    host.set_mode(Path::new(TOKEN), 0o640);
    let printed = host.join(&host.arguments(), Answer::NoTerminal).unwrap();
    assert!(printed.contains(&format!("wrote /{TOKEN}")), "{printed}");
    assert_eq!(host.mode(TOKEN), 0o600);
    // The image has the user, so that it needs no file that gives the token to it.
    assert!(!host.root.join("etc/tmpfiles.d").exists());
}

#[test]
fn files_are_restored_and_new_ones_are_removed() {
    let host = Host::new();
    let before = "logLevel: debug\n";
    host.write(CONFIG, before);
    host.set_mode(Path::new(CONFIG), 0o604);
    let arguments = host.arguments();
    let settings = JoinSettings {
        server: arguments.server,
        node_name: arguments.node_name,
    };
    let mut plan = Plan::new(Some(&host.root), &settings, &token(1)).unwrap();
    plan.write().unwrap();
    assert!(host.content(CONFIG).contains("worker-1"));
    plan.restore().unwrap();
    assert_eq!(host.content(CONFIG), before);
    assert_eq!(host.mode(CONFIG), 0o604);
    for path in [TOKEN, UNIT] {
        assert!(!host.root.join(path).exists(), "{path}");
    }
}

#[test]
fn command_without_systemd_has_the_values_and_a_place_for_the_token() {
    let mut arguments = Host::new().arguments();
    arguments.token_file = Some("-".into());
    arguments.server.push("b:2".to_owned());
    let expected = "tunnel-agent run --server cloud.example:10262 --server b:2 --node-name worker-1 --token-file TOKEN-FILE";
    assert_eq!(run_command(&arguments), expected);
}

#[test]
fn configuration_that_the_service_cannot_read_is_an_error_before_a_write() {
    let host = Host::new();
    host.write(CONFIG, "logLevel: debug\n");
    host.set_mode(Path::new(CONFIG), 0o600);
    let refused = host.join(&host.arguments(), Answer::Yes).unwrap_err();
    assert!(refused.to_string().contains("chmod 644"), "{refused}");
    assert_eq!(host.content(CONFIG), "logLevel: debug\n");
    assert!(!host.root.join(TOKEN).exists());
}
