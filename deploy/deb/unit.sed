# Turns a unit of deploy/systemd into the unit of a package.
1,/^$/ {
  /^#/d
  s|^$|# Settings: /etc/culvert/@PROGRAM@.yaml. Change this unit with: systemctl edit @PROGRAM@\n|
}
s|^Documentation=.*|Documentation=man:@PROGRAM@(8)|
s|/usr/local/bin/|/usr/bin/|
