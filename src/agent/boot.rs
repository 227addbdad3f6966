//! The boot channel: the agent says `Hello`, gets `Personalise`, and says that it is ready.

use std::io;

use casulo_protocol::agent::{Hello, MAX_LINE, Personalise, Personalised, VERSION};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::quote;

/// Waits for the agent's first line.
pub(crate) async fn hello<S: AsyncRead + Unpin>(channel: &mut S) -> io::Result<Hello> {
    let hello: Hello = line(channel).await?;
    if hello.protocol != VERSION {
        return Err(io::Error::other(format!(
            "the guest agent ({}) speaks protocol {}, but this Casulo speaks {VERSION}; build the \
             agent again with `cargo xtask build`",
            quote(&hello.agent),
            hello.protocol
        )));
    }
    Ok(hello)
}

/// Tells the agent who it is and waits until it is ready.
pub(crate) async fn personalise<S: AsyncRead + AsyncWrite + Unpin>(
    channel: &mut S,
    personalise: &Personalise,
) -> io::Result<()> {
    let mut text = serde_json::to_vec(personalise)?;
    text.push(b'\n');
    if text.len() > MAX_LINE {
        return Err(io::Error::other("the names of the shares are too long"));
    }
    channel.write_all(&text).await?;
    match line(channel).await? {
        Personalised::Ready { .. } => Ok(()),
        Personalised::Failed { error } => Err(io::Error::other(quote(&error))),
    }
}

/// One line of JSON. Reads byte by byte from what is buffered in the kernel: there are two short
/// lines in the life of a VM, and nothing may be read beyond the end of a line.
async fn line<S: AsyncRead + Unpin, T: DeserializeOwned>(channel: &mut S) -> io::Result<T> {
    let mut text = Vec::new();
    let mut reader = tokio::io::BufReader::with_capacity(4096, channel);
    loop {
        let byte = match reader.read_u8().await {
            Ok(b'\n') => break,
            Ok(byte) => byte,
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(io::Error::other("the guest agent closed the boot channel"));
            }
            Err(e) => return Err(e),
        };
        text.push(byte);
        if text.len() > MAX_LINE {
            return Err(io::Error::other("the guest agent's line is too long"));
        }
    }
    if !reader.buffer().is_empty() {
        return Err(io::Error::other("the guest agent spoke out of turn"));
    }
    // What is not understood may be repeated in the error, at any length.
    serde_json::from_slice(&text).map_err(|e| {
        io::Error::other(quote(&format!("the guest agent's line is not understood: {e}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn said(bytes: &[u8]) -> io::Result<Hello> {
        let (mut ours, mut theirs) = tokio::io::duplex(1 << 20);
        theirs.write_all(bytes).await.unwrap();
        drop(theirs);
        hello(&mut ours).await
    }

    fn orders() -> Personalise {
        Personalise {
            protocol: VERSION,
            entropy: "00".into(),
            clock_ns: 1,
            hostname: "casulo".into(),
            mounts: vec![],
            max_processes: 1,
            max_memory: None,
        }
    }

    #[tokio::test]
    async fn greets() {
        let good = br#"{"protocol":1,"agent":"0.1.0","started_us":1,"dialled_us":2}"#;
        assert_eq!(said(&[good.as_slice(), b"\n"].concat()).await.unwrap().dialled_us, 2);
    }

    #[tokio::test]
    async fn hostile_greetings_are_errors() {
        let wrong = br#"{"protocol":9,"agent":"\u001b[2J","started_us":1,"dialled_us":2}"#;
        let error = said(&[wrong.as_slice(), b"\n"].concat()).await.unwrap_err().to_string();
        assert!(error.contains("protocol 9") && !error.contains('\u{1b}'), "{error}");
        for bytes in [b"".as_slice(), b"{}\n", b"\xff\xff\n", b"no end", b"{}\n{}\n"] {
            assert!(said(bytes).await.is_err());
        }
        let long = format!("{{\"protocol\":\"{}\"}}\n", "long".repeat(10_000));
        let error = said(long.as_bytes()).await.unwrap_err().to_string();
        assert!(error.contains("longlong") && error.len() <= 2000, "{} bytes", error.len());
        assert!(said(&vec![b'x'; MAX_LINE + 10]).await.unwrap_err().to_string().contains("long"));
    }

    #[tokio::test]
    async fn a_failed_personalisation_says_why() {
        for (answer, good) in
            [("{\"ready_us\":5}\n", true), ("{\"error\":\"no such tag\"}\n", false)]
        {
            let (mut ours, mut theirs) = tokio::io::duplex(1 << 16);
            theirs.write_all(answer.as_bytes()).await.unwrap();
            let result = personalise(&mut ours, &orders()).await;
            assert_eq!(result.is_ok(), good);
            if let Err(e) = result {
                assert_eq!(e.to_string(), "no such tag");
            }
        }
    }
}
