// What handles stand for. An object outlives its handle, so that no later one has the same and a late use is noticed.
#pragma once

#include <mutex>
#include <set>

#include "unobserved.h"

namespace gpusim {

template <class Object, class Handle>
class Handles {
 public:
  Handle add(Object* object) {
    const Locked locked(mutex_);
    objects_.insert(object);
    return reinterpret_cast<Handle>(object);
  }

  // Null: it never was, or is destroyed.
  Object* find(Handle handle) {
    auto* object = reinterpret_cast<Object*>(handle);
    const Locked locked(mutex_);
    return objects_.count(object) != 0 ? object : nullptr;
  }

  std::set<Object*> all() {
    const Locked locked(mutex_);
    return objects_;
  }

  Object* remove(Handle handle) {
    Object* object = find(handle);
    const Locked locked(mutex_);
    objects_.erase(object);
    return object;
  }

 private:
  std::mutex mutex_;
  std::set<Object*> objects_;
};

}  // namespace gpusim
