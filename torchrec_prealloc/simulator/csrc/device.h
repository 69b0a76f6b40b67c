#pragma once

namespace sim {

void install_hooks(); // once, after loading

} // namespace sim
