use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::CertificateDer;
use tunnel_process::files;
use tunnel_proto::identity::spki_sha256;
use tunnel_proto::tls::{self, AgentTrust};
use tunnel_proto::wire::node_certificate::NodeCertificate;
use tunnel_store::testing::{Scratch, assert_contains, node};

use super::*;
use crate::revocation::Revocations;
use RotationAction::{Abort, Begin, ForceNext, Next};

mod simulation;

const DAY: Duration = Duration::from_secs(86_400);

struct Fixture {
    scratch: Scratch,
    rotator: CaRotator,
}

impl Fixture {
    fn new() -> Self {
        let scratch = Scratch::new();
        let rotator = rotator(&scratch);
        Self { scratch, rotator }
    }

    /// Creates the server again from its files, as a restart does.
    fn restart(&mut self) {
        self.rotator.nodes.save().unwrap();
        self.rotator = rotator(&self.scratch);
    }

    fn root(&self) -> Vec<u8> {
        self.rotator.ca.root().to_vec()
    }

    fn roots(&self) -> usize {
        self.rotator.ca.roots().len()
    }

    fn progress(&self) -> RotationProgress {
        self.rotator.status_alone().unwrap().in_progress.unwrap()
    }

    /// Records an agent whose certificate is issued at this time.
    fn connect(&self, issued: SystemTime) {
        let not_after = issued + self.rotator.ca.life();
        let nodes = &self.rotator.nodes;
        nodes.record_connection(&node(), issued, not_after);
    }
}

impl CaRotator {
    /// Acts without an answer of another server.
    fn act_alone(&self, action: RotationAction) -> Result<RotationStatus, RotationError> {
        self.act(action, &OtherAgents::default())
    }

    fn status_alone(&self) -> Result<RotationStatus, CaError> {
        self.status(&OtherAgents::default())
    }
}

fn rotator(scratch: &Scratch) -> CaRotator {
    let ca = Arc::new(LocalCa::load_or_create(&scratch.0).unwrap());
    let nodes = Arc::new(KnownNodes::open(&scratch.0).unwrap());
    CaRotator::new(ca, scratch.0.clone(), nodes)
}

#[test]
fn each_stage_waits_for_the_agents_and_survives_a_restart() {
    let mut server = Fixture::new();
    let old = server.root();
    server.connect(SystemTime::now());
    let begun = server
        .rotator
        .act_alone(Begin)
        .unwrap()
        .in_progress
        .unwrap();
    assert_eq!(begun.stage, RotationStage::Announced);
    assert_eq!((server.roots(), server.root()), (4, old.clone()));
    for expected in [RotationStage::Announced, RotationStage::Issuing] {
        let progress = server.progress();
        assert_eq!(progress.stage, expected);
        assert_eq!((progress.agents.renewed, progress.agents.pending), (0, 1));
        assert_eq!(progress.agents.pending_nodes, ["worker-1"]);
        let refused = server.rotator.act_alone(Next).unwrap_err();
        assert_contains(&refused, "--force");
        let again = server.rotator.act_alone(Begin).unwrap_err();
        assert!(matches!(again, RotationError::InProgress));
        server.restart();
        assert_eq!(server.progress(), progress);
        assert_eq!(server.roots(), 4);

        // The certificate may not have arrived.
        let renewed = progress.since + server.rotator.ca.life();
        server.rotator.nodes.record_renewal(&node(), renewed);
        let agents = server.progress().agents;
        assert_eq!((agents.renewed, agents.pending), (0, 1));
        server.connect(progress.since);
        assert_eq!(server.progress().agents.renewed, 1);
        server.rotator.act_alone(Next).unwrap();
        assert_ne!(server.root(), old);
        let new = server.root();
        server.restart();
        assert_eq!(server.root(), new);
    }
    assert_eq!(server.roots(), 1);
    assert_eq!(server.rotator.status_alone().unwrap().in_progress, None);
    assert!(!server.scratch.0.ca_rotation().exists());
    let ended = server.rotator.act_alone(Next).unwrap_err();
    assert!(matches!(ended, RotationError::NotInProgress));
}

#[test]
fn connected_agents_with_a_certificate_of_before_the_stage_are_due() {
    let mut server = Fixture::new();
    let connected = Surroundings {
        connected: [node()].into(),
        ..Surroundings::default()
    };
    server.rotator = server
        .rotator
        .observing(Arc::new(move || connected.clone()));
    server.connect(SystemTime::now());
    server.rotator.nodes.record(&"away".parse().unwrap(), &[]);
    assert_eq!(server.rotator.due_agents().unwrap(), None);
    server.rotator.act_alone(Begin).unwrap();
    let since = server.progress().since;
    let due = |at| server.rotator.due_agents_at(at).unwrap();
    let before = since - Duration::from_secs(1);
    assert_eq!(due(before), None, "servers may not follow yet");
    assert_eq!(due(since), Some((since, vec![node()])));
    server.connect(since);
    assert_eq!(due(since), Some((since, Vec::new())));
}

#[test]
fn certificate_of_the_old_ca_is_refused_after_the_last_stage() {
    let server = Fixture::new();
    let ca = &server.rotator.ca;
    let key = KeyPair::generate().unwrap();
    let csr = CertificateParams::default()
        .serialize_request(&key)
        .unwrap();
    let issue = || ca.issue_agent(csr.der(), &node()).unwrap().chain;
    let revocations = Arc::new(Revocations::open(&server.scratch.0, true).unwrap());
    let roots = || tls::roots(ca.roots()).unwrap();
    let trust = AgentTrust::new(roots(), revocations.revocation_check()).unwrap();
    let accepts = |chain: &[CertificateDer<'_>]| {
        trust.replace(roots()).unwrap();
        trust.still_accepts(chain)
    };
    let old = issue();
    server.rotator.act_alone(Begin).unwrap();
    assert!(accepts(&old) && accepts(&issue()));
    server.rotator.act_alone(Next).unwrap();
    let new = issue();
    assert!(accepts(&old) && accepts(&new));
    server.rotator.act_alone(Next).unwrap();
    assert!(!accepts(&old) && accepts(&new));
}

#[test]
fn each_ca_signs_the_other_until_the_rotation_ends() {
    let server = Fixture::new();
    let ca = &server.rotator.ca;
    server.rotator.act_alone(Begin).unwrap();
    let roots = ca.roots();
    let [old, new, new_by_old, old_by_new] = &roots[..] else {
        panic!("{} certificates", roots.len())
    };
    let key = |certificate| spki_sha256(certificate).unwrap();
    assert_eq!([key(new_by_old), key(old_by_new)], [key(new), key(old)]);
    assert!(tls::is_ca_signed_by(new_by_old, old));
    assert!(tls::is_ca_signed_by(old_by_new, new));
    assert!(!tls::is_ca_signed_by(new, old));
    // Programs that read the file find no path through these certificates.
    let name = tunnel_proto::identity::common_name;
    assert_ne!(name(new_by_old), name(new));
    server.rotator.act_alone(ForceNext).unwrap();
    assert_eq!(ca.roots(), roots);
    server.rotator.act_alone(ForceNext).unwrap();
    assert_eq!(ca.roots().as_slice(), std::slice::from_ref(new));
}

#[test]
fn abort_leads_back_to_the_old_ca_from_each_stage() {
    let mut server = Fixture::new();
    let old = server.root();
    server.connect(SystemTime::now());
    server.rotator.act_alone(Begin).unwrap();
    assert_eq!(server.rotator.act_alone(Abort).unwrap().in_progress, None);
    assert_eq!((server.roots(), server.root()), (1, old.clone()));

    server.rotator.act_alone(Begin).unwrap();
    server.rotator.act_alone(ForceNext).unwrap();
    server.connect(server.progress().since);
    server.rotator.act_alone(Abort).unwrap();
    let returning = server.progress();
    assert_eq!(returning.stage, RotationStage::Returning);
    assert_eq!((server.roots(), server.root()), (4, old.clone()));
    let again = server.rotator.act_alone(Abort).unwrap_err();
    assert!(matches!(again, RotationError::AlreadyReturning));
    assert!(
        server.rotator.act_alone(Next).is_err(),
        "an agent has the new CA's"
    );
    server.restart();
    server.connect(returning.since + DAY);
    server.rotator.act_alone(Next).unwrap();
    assert_eq!((server.roots(), server.root()), (1, old));
}

#[test]
fn crash_between_the_files_is_repaired_at_the_next_start() {
    let mut server = Fixture::new();
    let dir = server.scratch.0.clone();
    let paths = [dir.ca_certificate(), dir.ca_key()];
    let read = || paths.clone().map(|path| fs::read(path).unwrap());
    let write = |contents: &[Vec<u8>; 2]| {
        for (path, content) in paths.iter().zip(contents) {
            fs::write(path, content).unwrap();
        }
    };
    for action in [Begin, ForceNext] {
        let before = read();
        server.rotator.act_alone(action).unwrap();
        let after = read();
        // The process ended after it had persisted the stage.
        write(&before);
        server.restart();
        assert_eq!(read(), after);
    }
    // The process ended before it removed the rotation.
    let rotation = fs::read(dir.ca_rotation()).unwrap();
    let issuing = server.progress();
    server.rotator.act_alone(ForceNext).unwrap();
    files::replace(&dir.ca_rotation(), &rotation).unwrap();
    server.restart();
    assert_eq!(server.progress(), issuing);
    assert_eq!(server.roots(), 4);
}

#[test]
fn rotation_of_another_ca_or_a_damaged_one_is_refused_by_name() {
    let server = Fixture::new();
    server.rotator.act_alone(Begin).unwrap();
    let dir = &server.scratch.0;
    let message = || LocalCa::load_or_create(dir).unwrap_err().to_string();
    fs::remove_file(dir.ca_key()).unwrap();
    assert_contains(&message(), "ca-rotation.json does not belong to");
    let other = CaMaterial::generate(SystemTime::now()).unwrap();
    files::replace(&dir.ca_key(), other.key_pem().as_bytes()).unwrap();
    assert_contains(&message(), "remove it");
    fs::write(dir.ca_rotation(), "{}").unwrap();
    assert_contains(&message(), "ca-rotation.json holds no usable rotation");
    // An imported CA ends the rotation.
    crate::transfer::import(dir, &other).unwrap();
    let ca = LocalCa::load_or_create(dir).unwrap();
    assert_eq!(ca.spki_sha256(), other.spki_sha256);
}

#[test]
fn counts_are_by_the_issue_time_of_the_certificate_that_was_presented() {
    let server = Fixture::new();
    let nodes = &server.rotator.nodes;
    let now = SystemTime::now();
    let life = server.rotator.ca.life();
    let known = |name: &str, issued: SystemTime, end: SystemTime| {
        nodes.record_connection(&name.parse().unwrap(), issued, end);
    };
    known("expired", now - life, now - Duration::from_secs(1));
    // The lifetime was longer when this one was issued.
    known("long", now - DAY, now + life * 12);
    nodes.record(&"never".parse().unwrap(), &[]);
    nodes.record_kubelet(&"kubelet".parse().unwrap(), now - DAY, now + life * 12);
    server.rotator.act_alone(Begin).unwrap();
    let since = server.progress().since;
    known("renewed", since, since + life);
    let agents = server.progress().agents;
    let expected = AgentCounts {
        renewed: 1,
        pending: 1,
        pending_nodes: vec!["long".to_owned()],
        expired: 2,
        kubelets: 1,
    };
    assert_eq!(agents, expected);
}

#[derive(Debug)]
struct MemorySecret {
    material: Mutex<Arc<CaMaterial>>,
    rotation: Mutex<Option<Vec<u8>>>,
    version: AtomicU64,
    /// Number of writes by others after each read.
    writes_by_others: AtomicU64,
}

impl MemorySecret {
    fn new(material: Arc<CaMaterial>) -> Self {
        Self {
            material: Mutex::new(material),
            rotation: Mutex::default(),
            version: AtomicU64::new(1),
            writes_by_others: AtomicU64::new(0),
        }
    }

    fn material(&self) -> Arc<CaMaterial> {
        self.material.lock().clone()
    }

    fn version(&self) -> Option<String> {
        Some(self.version.load(Ordering::Relaxed).to_string())
    }
}

impl CaStore for MemorySecret {
    fn read(&self) -> Result<SharedCa, CaError> {
        let material = self.material.lock().clone();
        let check = |content: &Vec<u8>| Rotation::of_secret(content, "", "", &material);
        let rotation = self.rotation.lock().as_ref().map(check).transpose()?;
        let version = self.version();
        let others = self.writes_by_others.load(Ordering::Relaxed);
        self.version.fetch_add(others, Ordering::Relaxed);
        Ok(SharedCa {
            material,
            rotation,
            version,
        })
    }

    fn replace(
        &self,
        material: Arc<CaMaterial>,
        rotation: Option<&Rotation>,
        version: Option<String>,
    ) -> Result<bool, CaError> {
        if version != self.version() {
            return Ok(false);
        }
        let rotation = rotation.map(Rotation::to_json).transpose()?;
        *self.material.lock() = material;
        *self.rotation.lock() = rotation.map(|content| content.to_vec());
        self.version.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }
}

#[test]
fn next_stage_waits_for_every_server_and_is_refused_while_one_is_unknown() {
    let Fixture { scratch, rotator } = Fixture::new();
    let others = Arc::new(Mutex::new(Surroundings {
        unknown: Some("the API server refuses".to_owned()),
        ..Surroundings::default()
    }));
    let observed = others.clone();
    let rotator = rotator.observing(Arc::new(move || observed.lock().clone()));
    rotator.act_alone(Begin).unwrap();
    let next = || rotator.act_alone(Next).unwrap_err().to_string();
    assert_contains(
        &next(),
        "not known which servers there are: the API server refuses;",
    );
    others.lock().unknown = None;
    let names = (0..12).map(|number| format!("s{number:02}").parse().unwrap());
    others.lock().cas = names.map(|name| (name, None)).collect();
    let unknown = next();
    assert_contains(&unknown, "not connected to this one: s00, s01, ");
    assert!(
        unknown.contains("s09") && !unknown.contains("s10"),
        "{unknown}"
    );
    let set = |digest| {
        others
            .lock()
            .cas
            .values_mut()
            .for_each(|ca| *ca = Some(digest))
    };
    set([7; 32]);
    assert_contains(&next(), "do not follow this stage: s00, ");
    set(rotator.ca.digest());
    assert_contains(&next(), "because these servers do not answer: s00, s01, ");
    let mut answered = OtherAgents::default();
    for name in others.lock().cas.keys() {
        answered.add(name.clone(), Vec::new());
    }
    others.lock().moving = Some(Duration::from_secs(7));
    let moving = rotator.act(Next, &answered).unwrap_err();
    assert_contains(&moving, "run the command again in 8 s");
    others
        .lock()
        .cas
        .insert("s12".parse().unwrap(), Some(rotator.ca.digest()));
    let one = rotator.act(Next, &answered).unwrap_err();
    assert_contains(&one, "do not answer: s12; run");
    answered.add_too_large("s12".parse().unwrap());
    let large = rotator.act(Next, &answered).unwrap_err();
    assert_contains(&large, "more nodes than limits.directoryNodes of this one");
    assert_contains(&large, "have renewed: s12; raise");
    // An operator decides otherwise, and the stage of the others is then that of before.
    rotator.act_alone(ForceNext).unwrap();
    assert_contains(&next(), "do not follow this stage: s00, ");
    drop(scratch);
}

#[test]
fn wrong_clock_leaves_no_agent_behind() {
    let Fixture { scratch, rotator } = Fixture::new();
    let (life, now) = (rotator.ca.life(), SystemTime::now());
    let observed = Arc::new(Mutex::new(Surroundings::default()));
    let observe = observed.clone();
    let rotator = rotator.observing(Arc::new(move || observe.lock().clone()));
    rotator.act_alone(Begin).unwrap();
    // By this clock the agent's certificate expired days ago, but the agent has a session.
    let issued = now - life - DAY;
    rotator
        .nodes
        .record_connection(&node(), issued, issued + life);
    observed.lock().connected = [node()].into();
    let pending = rotator.act_alone(Next).unwrap_err();
    assert!(matches!(pending, RotationError::Pending { pending: 1 }));
    observed.lock().connected = BTreeSet::new();
    observed.lock().clocks = vec!["the clock of this server is 1day ahead of x".to_owned()];
    let refused = rotator.act_alone(Next).unwrap_err();
    assert_contains(&refused, "1day ahead of x; until then");
    observed.lock().clocks.clear();
    rotator.act_alone(Next).unwrap();
    // An operator decides otherwise.
    observed.lock().clocks = vec!["again".to_owned()];
    rotator.act_alone(ForceNext).unwrap();
    drop(scratch);
}

#[test]
fn stage_begins_again_while_a_server_does_not_follow_it() {
    let now = SystemTime::now();
    let old = Arc::new(CaMaterial::generate(now).unwrap());
    let (secret, scratch) = (Arc::new(MemorySecret::new(old.clone())), Scratch::new());
    let ca = Arc::new(LocalCa::new(old).unwrap());
    let nodes = Arc::new(KnownNodes::open(&scratch.0).unwrap());
    let surroundings = Arc::new(Mutex::new(Surroundings::default()));
    let observed = surroundings.clone();
    let rotator = CaRotator::of_secret(ca, secret.clone(), nodes)
        .observing(Arc::new(move || observed.lock().clone()));
    let since = || rotator.load().unwrap().rotation.unwrap().since;
    let hours = |hours: u64| now + Duration::from_secs(3600 * hours);
    let server = |digest| BTreeMap::from([("b".parse().unwrap(), digest)]);
    rotator.observe_followers_at(now).unwrap();
    rotator.act_at(Begin, &OtherAgents::default(), now).unwrap();
    // The CA of this server was replaced, just as the stage began.
    rotator.observe_followers_at(now).unwrap();
    let begun = since();
    assert!(begun < hours(1));
    surroundings.lock().cas = server(Some(rotator.ca.digest()));
    rotator.observe_followers_at(hours(1)).unwrap();
    assert_eq!(since(), begun, "it follows");
    surroundings.lock().cas = server(None);
    rotator.observe_followers_at(hours(2)).unwrap();
    assert!(
        since() > hours(2) && since() < hours(3),
        "it may not follow"
    );
    // A wrong clock moves nothing.
    surroundings.lock().clocks = vec!["ahead".to_owned()];
    rotator.observe_followers_at(hours(500)).unwrap();
    assert!(since() < hours(3));
    surroundings.lock().clocks.clear();
    // What cannot be written is written later.
    surroundings.lock().cas = server(Some([7; 32]));
    secret.writes_by_others.store(1, Ordering::Relaxed);
    rotator.observe_followers_at(hours(4)).unwrap();
    assert!(since() < hours(3));
    secret.writes_by_others.store(0, Ordering::Relaxed);
    surroundings.lock().cas = server(Some(rotator.ca.digest()));
    rotator.observe_followers_at(hours(9)).unwrap();
    assert!(since() > hours(4) && since() < hours(5));
}

#[test]
fn servers_with_one_secret_are_in_the_same_stage_and_a_conflict_changes_nothing() {
    let now = SystemTime::now();
    let old = Arc::new(CaMaterial::generate(now).unwrap());
    let secret = Arc::new(MemorySecret::new(old.clone()));
    let scratches = [(); 3].map(|()| Scratch::new());
    let server = |scratch: &Scratch, others: usize| {
        let ca = Arc::new(LocalCa::new(old.clone()).unwrap());
        let nodes = Arc::new(KnownNodes::open(&scratch.0).unwrap());
        let followed = secret.clone();
        let observe = move || {
            let digest = Some(followed.material.lock().digest());
            let cas = (0..others).map(|number| (format!("s{number}").parse().unwrap(), digest));
            Surroundings {
                cas: cas.collect(),
                ..Surroundings::default()
            }
        };
        CaRotator::of_secret(ca, secret.clone(), nodes).observing(Arc::new(observe))
    };
    let (one, other) = (server(&scratches[0], 0), server(&scratches[1], 0));
    let stages = || {
        let progress = [&one, &other].map(|server| server.status_alone().unwrap().in_progress);
        progress.map(|progress| progress.map(|progress| progress.stage))
    };
    let (issued, not_after) = (now, now + one.ca.life());
    one.nodes.record_connection(&node(), issued, not_after);
    let of_two = server(&scratches[2], 1);
    let before = of_two.status_alone().unwrap();
    assert_eq!((before.other_servers, before.not_counted.len()), (1, 0));
    one.act_alone(Begin).unwrap();
    assert_eq!(stages(), [Some(RotationStage::Announced); 2]);
    let again = other.act_alone(Begin).unwrap_err();
    assert!(matches!(again, RotationError::InProgress));
    // Every server counts the agents of all.
    let pending = one.act_alone(Next).unwrap_err();
    assert!(matches!(pending, RotationError::Pending { pending: 1 }));
    let silent = of_two.act_alone(Next).unwrap_err();
    assert_contains(&silent, "because these servers do not answer: s0;");
    assert_eq!(of_two.status_alone().unwrap().not_counted, ["s0"]);
    let answer = |since: Option<SystemTime>| {
        let mut answer = known_certificates(&one.nodes.snapshot(), &[].into(), &[].into());
        let later = since.into_iter().map(|since| NodeCertificate {
            issued: Some(since),
            ..answer[0].clone()
        });
        let later = later.collect::<Vec<_>>();
        answer.extend(later);
        let mut others = OtherAgents::default();
        others.add("s0".parse().unwrap(), answer);
        others
    };
    let counted = of_two.act(Next, &answer(None)).unwrap_err();
    assert!(matches!(counted, RotationError::Pending { pending: 1 }));
    let renewed = answer(Some(of_two.load().unwrap().rotation.unwrap().since));
    let status = of_two.status(&renewed).unwrap();
    assert!(status.not_counted.is_empty());
    let agents = status.in_progress.unwrap().agents;
    assert_eq!((agents.renewed, agents.pending), (1, 0));
    let rotation = of_two.load().unwrap().rotation.unwrap();
    assert!(of_two.check_renewed(&rotation, &renewed, now).is_ok());

    secret.writes_by_others.store(1, Ordering::Relaxed);
    let conflict = other.act_alone(Next).unwrap_err();
    assert_contains(&conflict, "changed meanwhile; run the command again");
    assert_eq!(stages(), [Some(RotationStage::Announced); 2]);
    assert_eq!(other.ca.roots().len(), 1);

    secret.writes_by_others.store(0, Ordering::Relaxed);
    other.act_alone(Next).unwrap();
    assert_eq!(stages(), [Some(RotationStage::Issuing); 2]);
    assert_ne!(other.ca.spki_sha256(), old.spki_sha256);
    assert_eq!(other.ca.roots().len(), 4);
    one.act_alone(ForceNext).unwrap();
    assert_eq!(stages(), [None; 2]);
    assert!(secret.rotation.lock().is_none());
    assert_eq!(one.ca.roots().len(), 1);
    assert!(secret.material.lock().is_same(&one.ca.material.load()));
    let text = format!("{:?}", Rotation::new(&old, &old, now).unwrap());
    assert!(!text.contains("PRIVATE"), "{text}");
}
