//! The reaper, in a process that is not process 1 but inherits orphans like it.

#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::path::PathBuf;
use std::time::Duration;

use casulo_agent::exec::{Engine, Task};
use casulo_agent::reaper::Reaper;
use casulo_agent::shares::Shares;
use casulo_agent::streams::Streams;

fn children() -> usize {
    let me = std::process::id();
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("stat")).ok())
        .filter(|stat| {
            let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
            rest.split_whitespace().nth(1) == Some(&me.to_string())
        })
        .count()
}

#[test]
fn orphans_are_reaped_and_own_children_keep_their_status() {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    // The main thread of the harness has SIGCHLD unblocked, so the signal may go there; a second
    // look after each of our own children is enough here.
    let signals = Reaper::signals().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let reaper = Reaper::default();
        let streams = Streams::new();
        let engine = Engine::new(
            PathBuf::from("/"),
            None,
            reaper.clone(),
            streams,
            Shares::default(),
            "/nonexistent".into(),
        )
        .unwrap();
        tokio::spawn(reaper.run(signals));
        for round in 0..20 {
            let script = format!("(setsid sh -c 'exit 7' &) ; (setsid true &); exit {round}");
            let argv = ["sh", "-c", script.as_str()].map(str::to_owned).to_vec();
            let options = casulo_protocol::agent::ExecOptions {
                cwd: "/".into(),
                user: common::user(),
                ..Default::default()
            };
            let task = Task { argv, options, extra: None };
            let result = engine.run(task, std::future::pending()).await.unwrap();
            assert_eq!(result.exit_code, Some(round));
        }
        let none = async {
            while children() > 0 {
                let argv = vec!["true".to_owned()];
                let options = casulo_protocol::agent::ExecOptions {
                    cwd: "/".into(),
                    user: common::user(),
                    ..Default::default()
                };
                let task = Task { argv, options, extra: None };
                engine.run(task, std::future::pending()).await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), none).await.unwrap();
    });
}
