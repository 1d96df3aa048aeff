//! The binary: runs a command and maps its result to an exit code.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use serde_json::json;
use tracing::{info, warn};
use tunnel_process::command_line::{self, EXIT_USAGE, unknown_variables};
use tunnel_process::diag::default_path;
use tunnel_process::host::raise_descriptor_limit;
use tunnel_process::metrics::COMMIT;
use tunnel_process::output::OutputFormat;
use tunnel_process::schema::Document;
use tunnel_process::secrets::forbid_core_dumps;
use tunnel_process::settings::ConfigError;
use tunnel_process::shutdown::{Shutdown, handle_signals};
use tunnel_process::telemetry;
use tunnel_process::timers::record_runtime_start;
use tunnel_process::{notify, runtime};
use tunnel_proto::audit;
use tunnel_server::admin::doctor;
use tunnel_server::admin::policy;
use tunnel_server::admin::render::RenderError;
use tunnel_server::admin::verbs::{VerbError, diag, is_running, running_dry_run, running_settings};
use tunnel_server::app::{App, busy_proxy_ports, check_config_files, check_ports};
use tunnel_server::cli::{Cli, ConfigArgs, DiagArgs, DoctorArgs, PolicyVerb, Verb, command};
use tunnel_server::config::{self, Config, DATA_DIR, ENV_PREFIX, LoadError};

/// jemalloc returns memory to the system within seconds after a load peak; glibc's allocator does
/// not. `.cargo/config.toml` sets its options.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    command_line::run("tunnel-server", |cli: Cli| run_verb(cli.verb), exit_code)
}

fn run_verb(verb: Verb) -> anyhow::Result<ExitCode> {
    match verb {
        Verb::Run(source) => run(*source),
        Verb::CheckConfig(arguments) => {
            let config = load(arguments.source)?;
            let (mut errors, mut busy) = (ConfigError::default(), Vec::new());
            if !arguments.settings_only {
                errors.extend(check_config_files(&config).err().unwrap_or_default());
                // A server that runs with the data directory has the addresses.
                if !command_line::block_on(is_running(&config.data_dir))?? {
                    errors.extend(check_ports(&config).err().unwrap_or_default());
                    busy = busy_proxy_ports(&config);
                }
            }
            let unknown = unknown_variables(ENV_PREFIX, &command());
            let unknown = unknown.iter();
            let unknown = unknown.map(|name| format!("unknown environment variable {name}"));
            for warning in config.warnings.iter().cloned().chain(busy).chain(unknown) {
                writeln!(std::io::stderr(), "warning: {warning}")?;
            }
            if !errors.is_empty() {
                return Err(errors.into());
            }
            let file = config.file.as_ref();
            let file = file.map_or_else(String::new, |file| format!(" ({})", file.path.display()));
            print(format!("configuration is valid{file}\n").as_bytes())
        }
        Verb::Reload(arguments) => block_on(arguments.run()),
        Verb::Token(verb) => block_on(verb.run()),
        Verb::Nodes(arguments) => block_on(arguments.run()),
        Verb::Ca(arguments) => block_on(arguments.run()),
        Verb::Data(verb) => block_on(verb.run()),
        Verb::Connect(arguments) => block_on(arguments.run()),
        Verb::Ping(arguments) => block_on(arguments.run()),
        Verb::Healthcheck(arguments) => block_on(arguments.run()),
        Verb::Diag(arguments) => block_on(run_diag(*arguments)),
        Verb::Doctor(arguments) => run_doctor(*arguments),
        Verb::Render(verb) => {
            verb.run()?;
            Ok(ExitCode::SUCCESS)
        }
        Verb::Policy(PolicyVerb::Show(source)) => {
            let config = load(*source)?;
            let found = command_line::block_on(running_dry_run(&config.data_dir))?;
            let text = [policy::show(&config), policy::show_dry_run(&found)].concat();
            print(text.as_bytes())
        }
        Verb::Policy(PolicyVerb::Test(arguments)) => {
            let (text, is_allowed) = arguments.request.decide(&load(arguments.source)?);
            let text = match arguments.output {
                OutputFormat::Table => text,
                OutputFormat::Json => {
                    let decision = json!({ "isAllowed": is_allowed, "decision": text });
                    serde_json::to_string_pretty(&Document::new(decision))?
                }
            };
            print(format!("{text}\n").as_bytes())?;
            Ok(ExitCode::from(u8::from(!is_allowed)))
        }
        Verb::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command(), "tunnel-server", &mut script);
            print(&script)
        }
        Verb::Version => {
            print(concat!("tunnel-server ", env!("CARGO_PKG_VERSION"), "\n").as_bytes())
        }
    }
}

fn print(text: &[u8]) -> anyhow::Result<ExitCode> {
    telemetry::print(text).context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}

/// Returns 64 if the user can fix the error, else 1.
fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(error) = error.downcast_ref::<VerbError>() {
        return error.exit_code();
    }
    if let Some(error) = error.downcast_ref::<RenderError>() {
        return error.exit_code();
    }
    if let Some(error) = error.downcast_ref::<LoadError>() {
        return if error.is_usage() { EXIT_USAGE } else { 1 };
    }
    let errors = error
        .chain()
        .find_map(|cause| cause.downcast_ref::<ConfigError>());
    if errors.is_some_and(ConfigError::is_usage) {
        EXIT_USAGE
    } else {
        1
    }
}

/// Runs a short command whose result is printed.
fn block_on(verb: impl Future<Output = Result<(), VerbError>>) -> anyhow::Result<ExitCode> {
    command_line::block_on(verb)??;
    Ok(ExitCode::SUCCESS)
}

fn run_doctor(arguments: DoctorArgs) -> anyhow::Result<ExitCode> {
    let DoctorArgs { options, source } = arguments;
    if let Some(id) = &options.explain {
        doctor::explain(id, options.output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let config = load_of_running(source)?;
    let code = command_line::block_on(doctor::run(&config, &options))??;
    Ok(ExitCode::from(code))
}

async fn run_diag(arguments: DiagArgs) -> Result<(), VerbError> {
    let ConfigArgs { config, settings } = arguments.source;
    let settings = config::load(settings, config.as_deref());
    let document = match &arguments.node {
        Some(node) => diag::collect_node(settings, node).await,
        None => diag::collect(settings).await,
    };
    let path = arguments.file;
    let subject = arguments
        .node
        .as_ref()
        .map_or("tunnel-server", |node| node.as_str());
    let path = path.unwrap_or_else(|| default_path(subject, SystemTime::now()));
    Ok(document.write(&path)?)
}

/// Returns the settings of the running server, unless a file is named. Flags and variables override
/// them. A server that does not answer has those that a start here would have, as far as is known.
fn load_of_running(source: ConfigArgs) -> anyhow::Result<Config> {
    let loaded = config::load(source.settings.clone(), source.config.as_deref());
    if source.config.is_some() {
        return Ok(loaded?);
    }
    let data_dir = match &loaded {
        Ok(config) => config.data_dir.clone(),
        Err(_) => source
            .settings
            .data_dir
            .as_deref()
            .unwrap_or(DATA_DIR)
            .into(),
    };
    let asking = running_settings(&data_dir);
    let asked = async { tokio::time::timeout(ASK_TIMEOUT, asking).await };
    match command_line::block_on(asked)? {
        Ok(Ok(Some(running))) => return Ok(Config::try_from(source.settings.or(running))?),
        Ok(Ok(None)) => {}
        Ok(Err(error)) => warn_of_other_settings(&error.to_string())?,
        Err(_elapsed) => warn_of_other_settings("it gives no answer")?,
    }
    Ok(loaded?)
}

fn warn_of_other_settings(problem: &str) -> std::io::Result<()> {
    let text = "cannot ask the running server for its settings, so they may differ from these";
    writeln!(std::io::stderr(), "warning: {text}: {problem}")
}

fn load(source: ConfigArgs) -> anyhow::Result<Config> {
    Ok(config::load(source.settings, source.config.as_deref())?)
}

fn run(source: ConfigArgs) -> anyhow::Result<ExitCode> {
    let config = load(source)?;
    check_config_files(&config)?;
    telemetry::enable_recent_lines();
    let log = &config.log;
    let _logs = telemetry::start(log.level, log.format, &log.access)?;
    let _audit = audit::start(&log.audit, "server")?;
    info!(
        version = env!("CARGO_PKG_VERSION"),
        commit = COMMIT,
        "starting"
    );
    if let Err(error) = forbid_core_dumps() {
        warn!(%error, "cannot disable core dumps; core dumps may contain keys");
    }
    if let Err(error) = raise_descriptor_limit() {
        warn!(%error, "cannot raise the limit of open files");
    }
    for name in unknown_variables(ENV_PREFIX, &command()) {
        warn!(name, "unknown environment variable is ignored");
    }
    record_runtime_start();
    let runtime = runtime::build(None)?;
    let ended = runtime.block_on(async {
        let shutdown = Shutdown::new();
        handle_signals(&shutdown, shutdown.leaving())?;
        let app = Box::pin(App::start(config, shutdown.clone())).await?;
        notify::started();
        app.run().await;
        anyhow::ensure!(
            !shutdown.has_listener_panicked(),
            "a listener panicked; see the log"
        );
        Ok(ExitCode::SUCCESS)
    });
    // A file system that hangs must not keep the process alive.
    runtime.shutdown_background();
    ended
}

/// Time for the answer of a running server about its settings.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
