//! What `serve` and its worker shall do, checked.

use std::net::IpAddr;

use super::args::{EngineArgs, OutputArgs};
use super::command::{Command, ServeConfig, WorkerConfig};
use super::config::{Checker, sampling};
use super::serve_args::{ListenArgs, ServeArgs, WorkerArgs};

impl Checker<'_> {
    pub(super) fn serve(&mut self, args: ServeArgs) -> (Option<Command>, OutputArgs) {
        let engine = self.serving_engine(&args.engine);
        let listen = self.listen(&args.listen);
        let model = self.model(args.model);
        let config = model.zip(listen).map(|(model, (host, access))| {
            Command::Serve(ServeConfig {
                model,
                host,
                port: u16::try_from(args.listen.port).expect("the flag's bounds fit a port"),
                access,
                queue_max: usize::try_from(args.listen.queue).expect("the flag's bounds are small"),
                engine,
                sampling: sampling(&args.sampling),
            })
        });
        (config, args.engine.output)
    }

    pub(super) fn worker(&mut self, args: WorkerArgs) -> (Option<Command>, OutputArgs) {
        let engine = self.engine(&args.engine);
        (self.model(args.model).map(|model| Command::Worker(WorkerConfig { model, engine })), args.engine.output)
    }

    fn serving_engine(&mut self, args: &EngineArgs) -> crate::settings::EngineSettings {
        if args.output.json {
            let json = self.shown("json");
            self.warnings.push(format!("{json} has no effect with serve, whose answers are JSON anyway: leave it out"));
        }
        self.engine(args)
    }

    fn listen(&mut self, args: &ListenArgs) -> Option<(IpAddr, crate::server::Access)> {
        let refusals_before = self.refusals.len();
        let host = if args.host == "localhost" { Ok(IpAddr::from([127, 0, 0, 1])) } else { args.host.trim_matches(['[', ']']).parse() };
        if host.is_err() {
            let shown = self.shown("host");
            self.refusals.push(format!("{shown}: an address is needed, such as 127.0.0.1, ::1 or 0.0.0.0"));
        }
        let words = |list: &Option<String>| -> Vec<String> {
            let words = list.iter().flat_map(|list| list.split(',')).map(str::trim);
            words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
        };
        let access = crate::server::Access {
            keys: words(&args.api_key),
            hosts: words(&args.allow_host),
            origins: words(&args.cors_origin).into_iter().map(|origin| origin.trim_end_matches('/').to_owned()).collect(),
        };
        if args.api_key.is_some() && access.keys.is_empty() {
            self.refusals.push("--api-key holds no key: give one, or leave it out".to_owned());
        }
        if !access.keys.is_empty() && args.no_auth {
            self.refusals
                .push("--api-key with --no-auth: one demands a key, the other lets everybody in. Leave one of them out".to_owned());
        }
        if let Ok(host) = host
            && !host.is_loopback()
            && access.keys.is_empty()
        {
            if args.no_auth {
                self.warnings.push(format!("everybody who can reach {host} may use this server, without a key (--no-auth)"));
            } else {
                let shown = self.shown("host");
                self.refusals.push(format!("{shown} without --api-key: others could use this server. Set a key, or say --no-auth"));
            }
        }
        for origin in &access.origins {
            if origin == "*" && access.keys.is_empty() {
                self.refusals.push(
                    "--cors-origin * without --api-key: any page that a browser shows could ask. Set a key, or list origins".to_owned(),
                );
            } else if origin != "*" && !origin.contains("://") {
                self.refusals.push(format!("--cors-origin {origin}: an origin begins with its scheme, such as https://chat.example"));
            }
        }
        host.ok().filter(|_| self.refusals.len() == refusals_before).map(|host| (host, access))
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::command::Command;
    use crate::cli::config::tests::checked;

    fn refusals(flags: &str) -> Vec<String> {
        checked(&format!("ebbtide serve -m m {flags}"), &[]).expect_err(flags).0
    }

    #[test]
    fn loopback_needs_no_key_and_anything_else_does() {
        let config = checked("ebbtide serve -m m", &[]).expect("loopback");
        let Command::Serve(serve) = config.command else { panic!("serve") };
        assert!(serve.host.is_loopback() && serve.port == 8080 && serve.access.keys.is_empty());
        for host in ["0.0.0.0", "::", "192.168.0.7"] {
            let told = refusals(&format!("--host {host}"));
            assert!(told.len() == 1 && told[0].contains("--api-key") && told[0].contains("--no-auth"), "{told:?}");
            assert!(checked(&format!("ebbtide serve -m m --host {host} --api-key k"), &[]).is_ok_and(|config| config.warnings.is_empty()));
            let open = checked(&format!("ebbtide serve -m m --host {host} --no-auth"), &[]).expect("said out loud");
            assert_eq!(open.warnings.len(), 1);
        }
        assert!(checked("ebbtide serve -m m --host ::1", &[]).is_ok() && checked("ebbtide serve -m m --host localhost", &[]).is_ok());
        assert!(refusals("--host example.org")[0].contains("an address is needed"));
    }

    #[test]
    fn keys_and_origins_are_lists_and_may_come_from_the_environment() {
        let config =
            checked("ebbtide serve -m m --cors-origin https://a.example/,*", &[("EBBTIDE_API_KEY", "one, two")]).expect("two keys");
        let Command::Serve(serve) = config.command else { panic!("serve") };
        assert_eq!(serve.access.keys, ["one", "two"]);
        assert_eq!(serve.access.origins, ["https://a.example", "*"]);
        assert!(refusals("--cors-origin *")[0].contains("--api-key"));
        assert!(refusals("--cors-origin a.example")[0].contains("scheme"));
        assert!(refusals("--api-key ,")[0].contains("no key"));
        assert!(refusals("--api-key k --no-auth")[0].contains("Leave one"));
    }
}
