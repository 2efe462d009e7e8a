//! A small HTTP client: one request a connection, so that a test decides when a client leaves and how a request is broken.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Longest silence that a test bears.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// A response whose body is still to come.
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    chunked: bool,
    reader: BufReader<TcpStream>,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The rest of the body.
    pub fn text(mut self) -> String {
        let mut body = Vec::new();
        if self.chunked {
            while let Some(chunk) = self.chunk() {
                body.extend(chunk);
            }
        } else {
            self.reader.read_to_end(&mut body).expect("a whole body");
        }
        String::from_utf8(body).expect("bodies are UTF-8")
    }

    pub fn json(self) -> Value {
        let status = self.status;
        let text = self.text();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{status}: {error}: {text:?}"))
    }

    /// The next chunk of a body that comes in chunks; `None` at its end, or where the connection broke.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let mut line = String::new();
        self.reader.read_line(&mut line).ok()?;
        let bytes = usize::from_str_radix(line.trim(), 16).ok()?;
        let mut chunk = vec![0; bytes + 2];
        self.reader.read_exact(&mut chunk).ok()?;
        chunk.truncate(bytes);
        Some(chunk).filter(|chunk| !chunk.is_empty())
    }
}

/// Sends `request` as it is and reads the head of the response; `None` where the server closed without one.
pub fn exchange(address: SocketAddr, request: &[u8]) -> Option<Response> {
    let mut stream = connect(address);
    // A server may answer and close before it has read all.
    let _ = stream.write_all(request);
    response(stream)
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(SILENCE_MAX)).expect("a time-out can be set");
    stream
}

/// Reads the head of a response.
pub fn response(stream: TcpStream) -> Option<Response> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let status = line.split(' ').nth(1)?.parse().ok()?;
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.push((name.to_owned(), value.trim().to_owned()));
    }
    let chunked = headers.iter().any(|(name, value)| name.eq_ignore_ascii_case("transfer-encoding") && value == "chunked");
    Some(Response { status, headers, chunked, reader })
}

/// A request with a body and further header lines.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut request = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        request.push_str("Host: localhost\r\n");
    }
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    request.push_str("\r\n");
    [request.as_bytes(), body].concat()
}

/// The data of server-sent events.
pub fn events(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
}
