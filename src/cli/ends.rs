//! How a command is told to end, and the thread that it runs on.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::FAILED;

/// Does `work` on this thread alone, and leaves behind what it did not finish: a read of standard input
/// may still be pending, and must not keep the process.
///
/// # Errors
/// Those of `work`, or there is no tokio.
pub(crate) fn on_this_thread<T>(
    work: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start: {e}"))?;
    let result = tokio.block_on(work);
    tokio.shutdown_background();
    result
}

/// Signals that end a command, with the exit statuses that a shell gives for them.
pub(crate) struct Ends {
    signals: Vec<(u8, Signal)>,
}

impl Ends {
    /// Takes them from now on, instead of being killed by them. The end of the terminal stays ignored
    /// where it is: whoever starts a command by `nohup` wants it to go on.
    ///
    /// # Errors
    /// The kernel does not let us.
    pub(crate) fn install() -> std::io::Result<Self> {
        let mut kinds = vec![SignalKind::interrupt(), SignalKind::terminate()];
        let hangup = SignalKind::hangup();
        if !std::fs::read_to_string("/proc/self/status").is_ok_and(|text| ignores(&text, hangup)) {
            kinds.push(hangup);
        }
        let with_status = |kind: SignalKind| {
            let status = u8::try_from(kind.as_raw_value().saturating_add(128)).unwrap_or(FAILED);
            Ok((status, signal(kind)?))
        };
        Ok(Self { signals: kinds.into_iter().map(with_status).collect::<std::io::Result<_>>()? })
    }

    /// The status of the next one.
    pub(crate) async fn next(&mut self) -> u8 {
        std::future::poll_fn(|context| {
            for (status, signal) in &mut self.signals {
                if signal.poll_recv(context).is_ready() {
                    return std::task::Poll::Ready(*status);
                }
            }
            std::task::Poll::Pending
        })
        .await
    }
}

/// Whether a process ignores a signal, by its `/proc/PID/status` (proc_pid_status(5)): in the mask, bit 0
/// is signal 1.
fn ignores(status: &str, signal: SignalKind) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let bit = u32::try_from(signal.as_raw_value()).ok().and_then(|number| number.checked_sub(1));
    bit.and_then(|bit| mask.checked_shr(bit)).is_some_and(|rest| rest & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_in_the_mask() {
        let status = "Name:\tx\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\n";
        assert!(ignores(status, SignalKind::hangup()) && ignores(status, SignalKind::pipe()));
        assert!(!ignores(status, SignalKind::interrupt()));
        assert!(!ignores("", SignalKind::hangup()));
    }
}
