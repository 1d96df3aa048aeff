//! Examples, units and the compose file are accepted by the programs that read them.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_tests::guides::{blocks, page, pages};
use tunnel_tests::manifests::{documents, items, repository};
use tunnel_tests::process::{Program, ScratchDir};
use tunnel_tests::tools::{Skip, Tool, or_skip};

/// Returns the files of a folder of the repository whose names begin with `begin`.
fn files(folder: &str, begin: &str) -> Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(repository().join(folder))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(begin) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

#[tokio::test]
async fn example_configurations_are_valid_without_a_warning() -> Result<()> {
    let scratch = ScratchDir::new()?;
    for (program, more, least) in [
        ("tunnel-server", &["--kubernetes", "off"][..], 2),
        ("tunnel-agent", &[][..], 1),
    ] {
        let examples = files("deploy/examples", program)?;
        ensure!(examples.len() >= least, "{program}: {examples:?}");
        for example in examples {
            // The copy has a safe mode, whatever umask the checkout had.
            let copy = scratch.file("example.yaml", std::fs::read(&example)?)?;
            let check =
                Program::ours(program)?.args(["check-config", "--settings-only", "--config"]);
            let output = check.arg(&copy).args(more).run().await?;
            let text = output.to_string();
            output.ok().with_context(|| example.display().to_string())?;
            ensure!(!text.contains("warning"), "{}: {text}", example.display());
        }
    }
    Ok(())
}

/// The settings of the guides that are a server's or an agent's.
#[tokio::test]
async fn settings_of_the_guides_are_valid() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let mut checked = 0;
    for path in pages()? {
        for block in blocks(&page(&path)?) {
            let mut more = match (&*block.language, &*block.mark) {
                ("yaml", "server") => vec!["--kubernetes", "off"],
                ("yaml", "agent") => vec!["--server", "a.example:10262", "--node-name", "worker-1"],
                _ => continue,
            };
            if block.mark == "agent" && !block.text.contains("certFile:") {
                more.extend(["--token", TOKEN]);
            }
            let settings = scratch.file("settings.yaml", &block.text)?;
            let check = Program::ours(&format!("tunnel-{}", block.mark))?
                .args(["check-config", "--settings-only", "--config"])
                .arg(settings);
            let checking = check.args(more).run().await?.ok();
            checking.with_context(|| format!("{path}:{}", block.line))?;
            checked += 1;
        }
    }
    ensure!(checked >= 20, "{checked}");
    Ok(())
}

#[tokio::test]
async fn compose_file_gives_each_program_arguments_that_it_takes() -> Result<()> {
    let text = std::fs::read_to_string(repository().join("deploy/compose/compose.yaml"))?;
    let compose = documents(&text)?.pop().context("a document")?;
    let services = compose["services"].as_object().context("services")?;
    let mut checked = 0;
    for (name, service) in services {
        let image = service["image"].as_str().unwrap_or_default();
        let Some(program) = ["tunnel-server", "tunnel-agent"]
            .into_iter()
            .find(|program| image.contains(program))
        else {
            continue;
        };
        let words: Vec<&str> = items(&service["command"])
            .filter_map(Value::as_str)
            .collect();
        ensure!(words.first() == Some(&"run"), "{name}: {words:?}");
        let mut check = Program::ours(program)?
            .args(["check-config", "--settings-only"])
            .args(&words[1..]);
        if program == "tunnel-agent" {
            check = check.args(["--token", TOKEN]);
        }
        let output = check.run().await?;
        output.ok().with_context(|| name.clone())?;
        checked += 1;
    }
    ensure!(checked == 3, "{checked} services run our programs");
    Ok(())
}

/// Checks a copy of each unit with systemd-analyze. Each unit must contain the installation path of
/// its program.
#[tokio::test]
async fn systemd_analyze_verifies_the_units() -> Result<()> {
    let Some(analyze) = or_skip(Program::tool(Tool::SystemdAnalyze)) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let mut verify = analyze.arg("verify").arg("--man=no");
    let units = files("deploy/systemd", "tunnel-")?;
    ensure!(units.len() == 2, "{units:?}");
    for unit in units {
        let name = unit.file_name().context("a name")?.to_owned();
        let text = std::fs::read_to_string(&unit)?;
        let program = Path::new(&name).with_extension("");
        let installed = format!("/usr/local/bin/{}", program.display());
        ensure!(text.contains(&installed), "{}", unit.display());
        // The check needs any existing program, so the copy names one that is installed.
        let copy = scratch.path().join(&name);
        std::fs::write(&copy, text.replace(&installed, "/bin/true"))?;
        verify = verify.arg(copy);
    }
    let output = verify.run().await?;
    let text = output.to_string();
    let out = output.ok()?;
    ensure!(out.is_empty() && unit_problems(&text) == 0, "{text}");
    Ok(())
}

/// Returns the number of lines about a unit in what systemd-analyze says. A systemd before 254 ignores
/// two keys, and restarts at an even pace.
pub(super) fn unit_problems(text: &str) -> usize {
    let ignored = ["'RestartSteps'", "'RestartMaxDelaySec'"];
    let lines = text.lines().filter(|line| line.contains(".service:"));
    let problems = lines.filter(|line| {
        let is_unknown = line.contains("Unknown key") && line.contains("ignoring");
        !(is_unknown && ignored.iter().any(|key| line.contains(key)))
    });
    problems.count()
}

#[test]
fn examples_apart_from_the_manifests_are_objects_of_their_kinds() -> Result<()> {
    let file = repository().join("deploy/examples/servicemonitor.yaml");
    let objects = documents(&std::fs::read_to_string(file)?)?;
    let kinds: Vec<_> = objects.iter().map(|object| &object["kind"]).collect();
    ensure!(
        kinds == ["Service", "ServiceMonitor", "ServiceMonitor"],
        "{kinds:?}"
    );
    Ok(())
}

/// Checks the scrape configuration with Prometheus' own tool.
#[test]
fn promtool_takes_the_scrape_example() -> Result<()> {
    let promtool = Tool::Promtool.find();
    let promtool = promtool.ok_or_else(|| Skip::because("needs promtool"));
    let Some(promtool) = or_skip(promtool) else {
        return Ok(());
    };
    for file in [
        "deploy/examples/prometheus.yml",
        "deploy/compose/prometheus.yml",
    ] {
        let output = std::process::Command::new(&promtool)
            .args(["check", "config"])
            .arg(repository().join(file))
            .output()?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{file}: {errors}");
    }
    Ok(())
}

/// A token in the form of a join token.
const TOKEN: &str = "9fc003be7234.959257e11ca36db30416e4647358e1d7987a025d1e144b63.aa2c57d1b9ba4495a3c267c1720747aec738a61428304ba2a6e8dd2e15639143";
